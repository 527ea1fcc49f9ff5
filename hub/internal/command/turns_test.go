package command

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestOneTurnAtATimeForEachKey(t *testing.T) {
	var all Turns
	var inside atomic.Int32
	var everyone sync.WaitGroup
	for range 50 {
		everyone.Go(func() {
			leave, err := all.take(t.Context(), "a")
			if err != nil || inside.Add(1) != 1 {
				t.Errorf("not alone: %v", err)
			}
			inside.Add(-1)
			leave()
		})
	}
	everyone.Wait()
	require.Empty(t, all.queue, "nothing is kept")

	leave, err := all.take(t.Context(), "a")
	require.NoError(t, err)
	other, err := all.take(t.Context(), "b")
	require.NoError(t, err, "another key is not in the way")
	other()
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = all.take(gone, "a")
	require.ErrorIs(t, err, context.Canceled)
	leave()
	require.Empty(t, all.queue)
}
