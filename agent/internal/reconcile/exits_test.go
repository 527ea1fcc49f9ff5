package reconcile_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/reconcile"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/protocol"
)

// listOf lists one container.
type listOf struct {
	reconcile.Containers
	container *runtime.Container
}

func (l listOf) List(context.Context) ([]runtime.Container, error) {
	return []runtime.Container{*l.container}, nil
}

// An agent that was killed while it started a container has not noted the start, and the container ends after the first
// sample of the next agent. While its exit is being recorded, a sample takes it for one that starts. Recorded then, the
// exit would be followed by the removal, and the usage since the first sample be lost.
func TestAnExitIsRecordedOnceItsUsageIsSealed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := state.Open(t.TempDir(), state.Options{MinFreeBytes: 1})
		require.NoError(t, err)
		defer func() { require.NoError(t, s.Close()) }()
		_, key, err := ed25519.GenerateKey(rand.Reader)
		require.NoError(t, err)
		require.NoError(t, s.Identify(nodeID, protocol.NewEd25519Signer(key)))
		boot := time.Now()
		source := state.Source{RTC: time.Now, SinceBoot: func() time.Duration { return time.Since(boot) }}
		c := &runtime.Container{
			ID: "m1.1", MemberID: "m1", Service: "app", State: runtime.StateRunning, StartedAt: boot.Add(time.Second),
		}
		r := reconcile.New(reconcile.Config{}, s, state.NewClock(s, source, time.Time{}), reconcile.Machine{
			Containers: listOf{container: c}, Stats: &unknownUse{}, Accelerators: idle{},
		}, nil)
		require.NoError(t, s.OpenRun(state.Run{ID: c.ID, MemberID: "m1", Service: "app", OpenedAt: boot}))
		time.Sleep(time.Minute)
		require.NoError(t, r.Sample(t.Context()))
		time.Sleep(time.Minute)
		c.State, c.ExitedAt = runtime.StateExited, time.Now()
		exit := agent.RecordExit{MemberID: "m1", ContainerID: c.ID, Service: "app"}
		r.Execute(t.Context(), exit)
		require.False(t, s.Measured(c.ID))
		require.False(t, s.Runs()[c.ID].ExitRecorded)
		require.NoError(t, r.Sample(t.Context()))
		r.Execute(t.Context(), exit)
		require.True(t, s.Measured(c.ID))
		require.True(t, s.Runs()[c.ID].ExitRecorded)
	})
}
