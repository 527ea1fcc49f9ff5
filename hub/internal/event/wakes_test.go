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

func TestItIsKnownWhetherSomethingChangedSinceAMoment(t *testing.T) {
	var w, other event.Wakes
	before := w.Moment()
	require.False(t, w.Since(before, "a"))
	w.Changed("b", "a")
	require.True(t, w.Since(before, "a"))
	after := w.Moment()
	require.False(t, w.Since(after, "a"))
	w.Changed("b")
	require.False(t, w.Since(after, "a"), "another one changed")
	require.True(t, w.Since(w.Moment()+1, "a"), "a moment that has not been")
	require.True(t, other.Since(after, "a"), "a moment of another process")
	for n := range 10_000 {
		w.Changed(fmt.Sprint(n))
	}
	require.True(t, w.Since(after, "a"), "what is forgotten may have changed")
}
