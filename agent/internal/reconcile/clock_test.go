package reconcile_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/reconcile"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/state"
)

// unstoppable has no container of a member, and stops none.
type unstoppable struct{ reconcile.Containers }

func (unstoppable) List(context.Context) ([]runtime.Container, error) { return nil, nil }

func (unstoppable) Stop(context.Context, string, time.Duration) error { return errors.New("it hangs") }

// onClock gives the test a reconciler that does not run, and its clock, in a bubble of synctest.
func onClock(t *testing.T, test func(t *testing.T, r *reconcile.Reconciler, clock *state.Clock)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s, err := state.Open(t.TempDir(), state.Options{MinFreeBytes: 1})
		require.NoError(t, err)
		defer func() { require.NoError(t, s.Close()) }()
		boot := time.Now()
		source := state.Source{RTC: time.Now, SinceBoot: func() time.Duration { return time.Since(boot) }}
		clock := state.NewClock(s, source, time.Time{})
		test(t, reconcile.New(reconcile.Config{}, s, clock, reconcile.Machine{
			Containers: unstoppable{}, Accelerators: idle{},
		}, nil), clock)
	})
}

// propose is an answer of a hub: the next sample sets the clock to it.
func propose(t *testing.T, r *reconcile.Reconciler, hub time.Time) {
	t.Helper()
	ended, cancel := context.WithCancel(t.Context())
	cancel() // the session does not wait
	r.SyncClock(ended, hub, 0)
}

// While containerd is away there is no sample. A hub with a wrong clock is followed by one that agrees with the node.
func TestATimeThatTheNextAnswerContradictsIsNotSet(t *testing.T) {
	onClock(t, func(t *testing.T, r *reconcile.Reconciler, clock *state.Clock) {
		before := clock.Now()
		propose(t, r, before.Add(24*time.Hour))
		propose(t, r, before)
		require.NoError(t, r.Sample(t.Context()))
		require.Equal(t, before, clock.Now())

		propose(t, r, before.Add(24*time.Hour))
		require.NoError(t, r.Sample(t.Context()))
		require.Equal(t, before.Add(24*time.Hour), clock.Now(), "one that nothing contradicts")
	})
}

// The pause after a failure ends by the node's clock. Once that is set back by a day, the end would be a day away.
func TestLaw13NoPauseIsLongerBecauseTheClockIsSetBack(t *testing.T) {
	onClock(t, func(t *testing.T, r *reconcile.Reconciler, clock *state.Clock) {
		r.Execute(t.Context(), agent.StopContainer{MemberID: "m1", ContainerID: "m1.1", Service: "app"})
		require.True(t, r.HeldBack("m1", "app"))
		propose(t, r, clock.Now().Add(-24*time.Hour))
		require.NoError(t, r.Sample(t.Context()))
		require.False(t, r.HeldBack("m1", "app"))
	})
}
