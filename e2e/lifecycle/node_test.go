package lifecycle_test

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// requireCutOff waits until the agent reports why it has no session.
func requireCutOff(w *harness.Testbed, a *devcluster.Agent, reason string) {
	w.T.Helper()
	w.Eventually("the agent knows that it is shut out", func() error {
		out, err := exec.Command(filepath.Join(a.Config.Bin, "gpuaas-agent"), "status", "-o", "json", "--local-socket",
			a.Ready.LocalSocket).Output()
		if err != nil {
			return err
		}
		var status struct {
			Hub struct {
				Connected bool   `json:"connected"`
				LastError string `json:"last_error"`
			} `json:"hub"`
		}
		if err := json.Unmarshal(out, &status); err != nil {
			return err
		}
		return harness.Pending(nil, !status.Hub.Connected && strings.Contains(status.Hub.LastError, reason))
	})
}

// containersOf is how many containers the instance has on the node.
func containersOf(w *harness.Testbed, i client.AppInstance) int {
	w.T.Helper()
	return w.ContainersOn(w.Agent, i)
}

// Law 9: a lost node ends its instances as node_lost. When it returns, it is emptied, and the bill ends at its loss.
func TestLaw09ALostNodeIsAnOutcomeOfItsOwnAndIsEmptiedWhenItReturns(t *testing.T) {
	w := harness.NewPlatform(t)
	s := w.AdminShell()
	node := w.Agent.Ready.NodeID
	containers := w.WatchContainerd(w.Agent.Config.ContainerdNamespace)
	i := w.Launch("app")
	pid := w.PidOf(i)

	require.Equal(t, client.NodeStatusDraining, harness.AsJSON[client.Node](s, "nodes", "drain", node).Status)
	s.Fails(6, "insufficient_capacity", "instances", "create", harness.AppSlug, "--project", "main", "--name", "late",
		"--allocation", w.Allocation.ID)
	s.Fails(6, "node_in_use", "nodes", "remove", node)
	s.Fails(6, "node_connected", "nodes", "remove", node, "--lost")
	w.RequireAnswer(i)
	require.Equal(t, client.NodeStatusOnline, harness.AsJSON[client.Node](s, "nodes", "undrain", node).Status)

	require.NoError(t, w.Agent.Stop())
	w.Eventually("the hub knows that the node hung up", func() error {
		n, err := client.Read[client.Node](w.Tenant.Admin.GetNode(w.Ctx, node))
		return harness.Pending(err, n.Status == client.NodeStatusOffline)
	})
	lost := harness.AsJSON[client.Node](s, "nodes", "remove", node, "--lost", "--reason", "burnt down")
	require.Equal(t, client.NodeStatusLost, lost.Status)
	require.Equal(t, "burnt down", lost.RemoveReason)
	got := w.Instance(i.ID)
	require.Equal(t, client.AppInstanceStatusFailed, got.Status)
	require.Equal(t, client.StatusReasonNodeLost, got.StatusReason)
	a, err := client.Read[client.Allocation](w.Operator.GetAllocation(w.Ctx, w.Tenant.Project.ID, w.Allocation.ID))
	require.NoError(t, err)
	require.Equal(t, client.AllocationStatusNodeLost, a.Status)
	require.Equal(t, client.AppInstanceStatusDecommissioned, w.Decommission(i).Status)
	require.Equal(t, []string{"requested", "deploying", "running", "failed", "decommission_requested", "decommissioned"},
		w.EventTypes(i.ID))
	require.Equal(t, pid, w.PidOf(i), "no hub could end it")

	w.RestartAgent(w.Agent)
	w.Eventually("nothing of it runs any more", func() error { return harness.Pending(nil, containersOf(w, i) == 0) })
	postings := w.FinalPostings(i)
	usage, err := w.Tenant.Usage(w.Ctx, i.ID)
	require.NoError(t, err)
	seconds := harness.RequireContiguous(t, usage)
	first, notBefore := containers.FirstStart()
	untilLost := lost.RemovedAt.Sub(first)
	w.Explain(harness.Faults{
		Why:      "what runs on a node after its loss is billed to nobody",
		Suspense: []string{"outside_claim"},
		Unbilled: containers.RunningTime(t) - untilLost,
	})
	harness.RequireBilledBetween(t, seconds, untilLost-harness.MeteringInterval-harness.EventDelay,
		lost.RemovedAt.Sub(notBefore)+harness.EventDelay)
	harness.RequireCost(t, postings, seconds, 1)
	require.Equal(t, client.NodeStatusLost, harness.AsJSON[client.Node](s, "nodes", "get", node).Status,
		"it stays what it was declared")
}

// One node is removed in order, another is banned; what the banned one runs goes on until its lease ends.
func TestARemovedAndABannedNodeAreShutOut(t *testing.T) {
	w := harness.NewPlatform(t)
	s := w.AdminShell()
	leaving := w.StartAgent(w.AgentConfig("leaving"))
	s.MustRun("nodes", "drain", leaving.Ready.NodeID)
	require.Equal(t, client.NodeStatusRemoved, harness.AsJSON[client.Node](s, "nodes", "remove", leaving.Ready.NodeID).
		Status)
	requireCutOff(w, leaving, "node_removed")

	node := w.Agent.Ready.NodeID
	i := w.Launch("app")
	pid := w.PidOf(i)
	require.Equal(t, client.NodeStatusBanned, harness.AsJSON[client.Node](s, "nodes", "ban", node, "--reason",
		"stolen").Status)
	requireCutOff(w, w.Agent, "node_banned")
	require.NoError(t, w.Agent.Kill9())
	w.RestartAgent(w.Agent)
	requireCutOff(w, w.Agent, "node_banned")
	require.Equal(t, pid, w.PidOf(i))
	w.RequireAnswer(i)
	s.MustRun("nodes", "remove", node, "--lost")
	require.Equal(t, client.StatusReasonNodeLost, w.Instance(i.ID).StatusReason)
	require.Len(t, harness.AsJSON[harness.Items[client.Node]](s, "nodes", "list", "--status", "removed").Items, 1)
	require.Len(t, harness.AsJSON[harness.Items[client.Node]](s, "nodes", "list", "--status", "banned").Items, 1,
		"banned stays the stronger word")
}
