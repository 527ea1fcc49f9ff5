package recovery_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	api "github.com/gpuaas/gpuaas/pkg/client"
)

// Law 4: the agent is killed while the app serves.
func TestLaw04AKilledAgentLeavesTheAppServingAndTheUsageWhole(t *testing.T) {
	w := harness.NewPlatform(t)
	containers := w.WatchContainerd(w.Agent.Config.ContainerdNamespace)
	i := w.Launch("app")
	pid := w.PidOf(i)
	serving := w.KeepCalling(i)
	_, err := w.Tenant.AwaitCharge(w.Ctx, i.ID)
	require.NoError(t, err)

	for range 3 {
		before, err := w.Tenant.Usage(w.Ctx, i.ID)
		require.NoError(t, err)
		require.NoError(t, w.Agent.Kill9())
		require.Equal(t, pid, w.PidOf(i), "the very process goes on")
		w.RequireAnswer(i)
		w.RestartAgent(w.Agent)
		w.Eventually("usage arrives again", func() error {
			after, err := w.Tenant.Usage(w.Ctx, i.ID)
			return harness.Pending(err, len(after) > len(before))
		})
	}
	require.NoError(t, serving(), "the app answered throughout")
	require.Equal(t, pid, w.PidOf(i))
	w.Decommission(i)
	w.FinalPostings(i)
	usage, err := w.Tenant.Usage(w.Ctx, i.ID)
	require.NoError(t, err)
	containers.RequireBill(t, "", harness.RequireContiguous(t, usage))
}

// Law 4: containerd's daemon is killed while the app serves.
func TestLaw04AKilledContainerdLeavesTheAppServing(t *testing.T) {
	w := harness.NewPlatform(t)
	i := w.Launch("app")
	pid := w.PidOf(i)
	serving := w.KeepCalling(i)
	require.NoError(t, w.Containerd.Kill9())
	w.RequireAnswer(i)
	restartContainerd(w)
	w.Eventually("the node sees its workload again", func() error {
		got, err := api.Read[api.AppInstance](w.Operator.GetAppInstance(w.Ctx, w.Tenant.Project.ID, i.ID))
		return harness.Pending(err, got.Status == api.AppInstanceStatusRunning && got.Health == api.AppInstanceHealthHealthy)
	})
	require.Equal(t, pid, w.PidOf(i))
	require.NoError(t, serving())
	w.Decommission(i)
}

// Law 3: a cold boot without the hub.
func TestLaw03AColdBootWithoutTheHubRestartsTheLeasedWorkload(t *testing.T) {
	w := harness.NewPlatform(t)
	i := w.Launch("app")
	cut := time.Now()
	require.NoError(t, w.Agent.Kill9())
	require.NoError(t, w.Hub.Kill9())
	w.RemoveContainersOf(w.Agent, cut)
	w.RestartAgent(w.Agent)
	w.Eventually("the app answers without a hub", func() error {
		_, err := scenario.Get(w.Ctx, i.Endpoints[0].URL+"/")
		return err
	})
	w.RestartHub()
	w.Eventually("the hub hears of it", func() error {
		got, err := api.Read[api.AppInstance](w.Operator.GetAppInstance(w.Ctx, w.Tenant.Project.ID, i.ID))
		return harness.Pending(err, got.Status == api.AppInstanceStatusRunning && got.Health == api.AppInstanceHealthHealthy)
	})
	w.Decommission(i)
}

func restartContainerd(w *harness.Testbed) {
	w.T.Helper()
	require.NoError(w.T, w.Containerd.Start(w.Ctx))
}
