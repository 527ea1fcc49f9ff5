package chaos_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
)

// The kernel oracle agrees with containerd for as long as containerd runs.
func TestTheKernelOracleAgreesWithContainerd(t *testing.T) {
	w := harness.NewPlatform(t)
	o := w.WatchKernel(w.Agent.Config.ContainerdNamespace)
	containers := w.WatchContainerd(w.Agent.Config.ContainerdNamespace)
	began := time.Now()
	app := w.Launch("app")
	serving := time.Now()
	w.Decommission(app)
	containers.RunningTime(t)
	processes := o.Processes()
	require.Len(t, processes, 1)
	for id, l := range processes {
		started, exited := containers.Lifetime(id)
		const tick = time.Second / harness.ClockTicksPerSecond
		require.False(t, l.CreatedAt.Before(began.Add(-tick)), "created at %s, asked for at %s", l.CreatedAt, began)
		require.False(t, started.Before(l.CreatedAt.Add(-tick)), "containerd reports the start later")
		require.False(t, started.Before(l.NotStartedAt), "and not before the start")
		require.True(t, l.NotStartedAt.Before(serving), "it has started once it serves")
		require.False(t, l.StartedAt.Before(l.CreatedAt), "it starts after it is created")
		require.True(t, l.StartedAt.Before(exited), "and before it exits")
		require.False(t, l.EndedAt.Before(l.StartedAt))
	}
}
