package event_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/event"
)

func woken(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func TestAChangeWakesThoseWhoWaitForItAndNobodyElse(t *testing.T) {
	var w event.Wakes
	w.Changed("a") // nobody waits
	one, off := w.On("a")
	two, _ := w.On("a")
	other, _ := w.On("b")
	w.Changed("a", "c")
	w.Changed("a") // what nobody has taken is merged
	require.True(t, woken(one))
	require.False(t, woken(one))
	require.True(t, woken(two))
	require.False(t, woken(other))
	off()
	off()
	w.Changed("a")
	require.False(t, woken(one))
	require.True(t, woken(two))
	w.Close()
	require.True(t, w.Closed())
	require.True(t, woken(two))
	require.True(t, woken(other))
	none, off := w.On("a")
	require.Nil(t, none)
	off()
}

func TestSoManyMayWaitAndNoMore(t *testing.T) {
	var w event.Wakes
	first, off := w.On("a")
	require.NotNil(t, first)
	last := first
	for last != nil {
		last, _ = w.On("b")
	}
	off()
	again, _ := w.On("c")
	require.NotNil(t, again)
}

func TestAVersionChangesWithItsResourceAndWithWhatIsForgotten(t *testing.T) {
	var w event.Wakes
	before := w.Version("a")
	w.Changed("b", "a")
	after := w.Version("a")
	require.NotEqual(t, before, after)
	w.Changed("b")
	require.Equal(t, after, w.Version("a"), "another one changed")
	for n := range 10_000 {
		w.Changed(fmt.Sprint(n))
	}
	require.NotEqual(t, after, w.Version("a"), "what is forgotten may have changed")
}
