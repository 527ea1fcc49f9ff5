package notify_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/notify"
)

// pending reports whether a wake-up waits in the channel, and receives it.
func pending(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func TestSignalsThatWereNotReceivedMerge(t *testing.T) {
	s := notify.NewSignal()
	require.False(t, pending(s))
	for range 3 {
		s.Send() // never blocks
	}
	require.True(t, pending(s))
	require.False(t, pending(s))
	s.Send()
	require.True(t, pending(s), "a signal after a receive is a new one")
}

func TestBroadcastWakesEachSubscriberOnce(t *testing.T) {
	var b notify.Broadcast
	b.Send() // nobody listens
	first, second := b.Subscribe(), b.Subscribe()
	require.False(t, pending(first), "a subscription begins with the next signal")
	b.Send()
	b.Send()
	require.True(t, pending(first))
	require.True(t, pending(second), "receivers do not take signals from each other")
	require.False(t, pending(first))
}
