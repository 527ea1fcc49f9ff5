package runtime

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A pull goes on for as long as a caller waits for it, whichever caller started it. The next pull of the image starts
// after the end of the cancelled one.
func TestLaw13APullEndsWithItsLastCaller(t *testing.T) {
	r := &Runtime{pulls: map[string]*sharedPull{}}
	begun, ended := make(chan struct{}, 2), make(chan struct{}, 2)
	call := func() (leave context.CancelFunc, left chan error) {
		ctx, cancel := context.WithCancel(t.Context())
		left = make(chan error, 1)
		go func() {
			left <- r.sharePull(ctx, "image", func(ctx context.Context) error {
				begun <- struct{}{}
				<-ctx.Done()
				ended <- struct{}{}
				return ctx.Err()
			})
		}()
		return cancel, left
	}
	callers := func(want int) {
		require.Eventually(t, func() bool {
			r.mu.Lock()
			defer r.mu.Unlock()
			p := r.pulls["image"]
			return p != nil && p.callers == want
		}, time.Minute, time.Millisecond)
	}
	awaitEnd := func() {
		require.Eventually(t, func() bool { return len(ended) == 1 }, time.Minute, time.Millisecond)
		<-ended
	}
	leaveFirst, first := call()
	<-begun
	leaveSecond, second := call()
	callers(2)
	leaveFirst()
	require.ErrorIs(t, <-first, context.Canceled)
	callers(1)
	require.Empty(t, ended, "the second caller still waits")
	leaveSecond()
	require.ErrorIs(t, <-second, context.Canceled)
	awaitEnd()

	leaveThird, third := call()
	<-begun // anew
	leaveThird()
	require.ErrorIs(t, <-third, context.Canceled)
	awaitEnd()
}
