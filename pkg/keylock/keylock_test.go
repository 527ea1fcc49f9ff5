package keylock

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestOneHolderForEachKey(t *testing.T) {
	var locks Map
	var inside atomic.Int32
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			unlock, err := locks.Lock(t.Context(), "a")
			if err != nil || inside.Add(1) != 1 {
				t.Errorf("not alone: %v", err)
			}
			inside.Add(-1)
			unlock()
		})
	}
	all.Wait()
	require.Zero(t, locks.Len(), "no key is kept")
}

func TestKeysDoNotWaitForEachOther(t *testing.T) {
	var locks Map
	unlock, err := locks.Lock(t.Context(), "a")
	require.NoError(t, err)
	other, err := locks.Lock(t.Context(), "b")
	require.NoError(t, err)
	require.Equal(t, 2, locks.Len())
	other()
	unlock()
	require.Zero(t, locks.Len())
}

func TestAWaiterLeavesWhenItsContextEnds(t *testing.T) {
	var locks Map
	unlock, err := locks.Lock(t.Context(), "a")
	require.NoError(t, err)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = locks.Lock(ended, "a")
	require.ErrorIs(t, err, context.Canceled)
	unlock()
	require.Zero(t, locks.Len())
	unlock, err = locks.Lock(t.Context(), "a")
	require.NoError(t, err, "the key is free again")
	unlock()
}

func TestTryLockDoesNotWait(t *testing.T) {
	var locks Map
	unlock, free := locks.TryLock("a")
	require.True(t, free)
	_, free = locks.TryLock("a")
	require.False(t, free)
	unlock()
	require.Zero(t, locks.Len())
}

func TestAKeyHasAsManyHoldersAsTheMapAllows(t *testing.T) {
	locks := Map{Holders: 2}
	var unlocks []func()
	for range 2 {
		unlock, free := locks.TryLock("a")
		require.True(t, free)
		unlocks = append(unlocks, unlock)
	}
	_, free := locks.TryLock("a")
	require.False(t, free)
	other, free := locks.TryLock("b")
	require.True(t, free)
	other()
	for _, unlock := range unlocks {
		unlock()
	}
	require.Zero(t, locks.Len())
}
