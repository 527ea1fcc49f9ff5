package e2e_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/containerd/containerd/v2/client"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	api "github.com/gpuaas/gpuaas/pkg/client"
)

// Law 4: the agent is killed while the app serves.
func TestLaw04AKilledAgentLeavesTheAppServingAndTheUsageWhole(t *testing.T) {
	w := platform(t)
	containers := w.listen(w.agent.Config.ContainerdNamespace)
	i := w.launch("app")
	pid := w.pidOf(i)
	serving := w.keepAsking(i)
	_, err := w.tenant.AwaitCharge(w.ctx, i.ID)
	require.NoError(t, err)

	for range 3 {
		before, err := w.tenant.Usage(w.ctx, i.ID)
		require.NoError(t, err)
		require.NoError(t, w.agent.Kill9())
		require.Equal(t, pid, w.pidOf(i), "the very process goes on")
		w.answers(i)
		w.restartAgent(w.agent)
		w.eventually("usage arrives again", func() error {
			after, err := w.tenant.Usage(w.ctx, i.ID)
			return orMissing(err, len(after) > len(before))
		})
	}
	require.NoError(t, serving(), "the app answered throughout")
	require.Equal(t, pid, w.pidOf(i))
	w.decommission(i)
	w.eventually("the bill is final", func() error {
		postings, err := w.tenant.Postings(w.ctx, i.ID)
		return orMissing(err, hasKind(postings, api.PostingKindHoldClosed))
	})
	usage, err := w.tenant.Usage(w.ctx, i.ID)
	require.NoError(t, err)
	requireWithinBeat(t, containers.running(t), requireContiguous(t, usage, "session_seconds"))
}

// Law 4: containerd's daemon is killed while the app serves.
func TestLaw04AKilledContainerdLeavesTheAppServing(t *testing.T) {
	w := platform(t)
	i := w.launch("app")
	pid := w.pidOf(i)
	serving := w.keepAsking(i)
	require.NoError(t, w.containerd.Kill9())
	w.answers(i)
	w.restartContainerd()
	w.eventually("the node sees its workload again", func() error {
		got, err := api.Read[api.AppInstance](w.operator.GetAppInstance(w.ctx, w.tenant.Project.ID, i.ID))
		return orMissing(err, got.Status == api.AppInstanceStatusRunning && got.Health == api.AppInstanceHealthHealthy)
	})
	require.Equal(t, pid, w.pidOf(i))
	require.NoError(t, serving())
	w.decommission(i)
}

// Law 3: a cold boot without the hub.
func TestLaw03AColdBootWithoutTheHubBringsTheLeasedWorkloadBack(t *testing.T) {
	w := platform(t)
	i := w.launch("app")
	require.NoError(t, w.agent.Kill9())
	require.NoError(t, w.hub.Kill9())
	w.removeContainers()
	w.restartAgent(w.agent)
	w.eventually("the app answers without a hub", func() error {
		_, err := scenario.Get(w.ctx, i.Endpoints[0].URL+"/")
		return err
	})
	w.restartHub()
	w.eventually("the hub hears of it", func() error {
		got, err := api.Read[api.AppInstance](w.operator.GetAppInstance(w.ctx, w.tenant.Project.ID, i.ID))
		return orMissing(err, got.Status == api.AppInstanceStatusRunning && got.Health == api.AppInstanceHealthHealthy)
	})
	w.decommission(i)
}

// removeContainers does what a power cut does to containers: they are gone, without a word to the agent.
func (w *world) removeContainers() {
	w.t.Helper()
	w.removeContainersOf(w.agent)
}

func (w *world) removeContainersOf(a *devcluster.Agent) {
	w.t.Helper()
	cl, err := client.New(w.containerd.Address, client.WithDefaultNamespace(a.Config.ContainerdNamespace))
	require.NoError(w.t, err)
	defer func() { require.NoError(w.t, cl.Close()) }()
	containers, err := cl.Containers(w.ctx)
	require.NoError(w.t, err)
	require.NotEmpty(w.t, containers)
	for _, c := range containers {
		task, err := c.Task(w.ctx, nil)
		require.NoError(w.t, err)
		_, err = task.Delete(w.ctx, client.WithProcessKill)
		require.NoError(w.t, err)
		require.NoError(w.t, c.Delete(w.ctx, client.WithSnapshotCleanup))
	}
}

func (w *world) restartContainerd() {
	w.t.Helper()
	require.NoError(w.t, w.containerd.Start(w.ctx))
}

// pidOf is the process of the instance's one container.
func (w *world) pidOf(i api.AppInstance) uint32 {
	w.t.Helper()
	return w.pidOn(w.agent, i)
}

// pidOn is pidOf on another node.
func (w *world) pidOn(a *devcluster.Agent, i api.AppInstance) uint32 {
	w.t.Helper()
	cl, err := client.New(w.containerd.Address, client.WithDefaultNamespace(a.Config.ContainerdNamespace))
	require.NoError(w.t, err)
	defer func() { require.NoError(w.t, cl.Close()) }()
	containers, err := cl.Containers(w.ctx, fmt.Sprintf("labels.%q==%q", "gpuaas.instance", i.ID))
	require.NoError(w.t, err)
	require.Len(w.t, containers, 1)
	task, err := containers[0].Task(w.ctx, nil)
	require.NoError(w.t, err)
	return task.Pid()
}

// keepAsking calls the app again and again until the returned function is called, which tells of the first failure.
func (w *world) keepAsking(i api.AppInstance) (stop func() error) {
	return w.keepGetting(func(ctx context.Context) error {
		_, err := scenario.Get(ctx, i.Endpoints[0].URL+"/")
		return err
	})
}
