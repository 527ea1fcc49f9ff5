package e2e_test

import (
	"encoding/json"
	"fmt"
	"math/big"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// adminShell is the platform admin at a terminal, logged in.
func (w *world) adminShell() *shell {
	w.t.Helper()
	s := w.shell("admin")
	s.gpuaas("login", "--name", "e2e", "--url", w.hub.Ready.APIURL, "--ca-file", w.hub.Ready.CAFile, "--token-file",
		w.hub.Ready.TokenFile)
	return s
}

// isCutOff waits until the agent itself says why it has no session.
func (w *world) isCutOff(a *devcluster.Agent, reason string) {
	w.t.Helper()
	w.eventually("the agent knows that it is shut out", func() error {
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
		return orMissing(nil, !status.Hub.Connected && strings.Contains(status.Hub.LastError, reason))
	})
}

// containersOf is how many containers the instance has on the node.
func (w *world) containersOf(i client.AppInstance) int {
	w.t.Helper()
	return w.containersOn(w.agent, i)
}

// containersOn is containersOf on another node.
func (w *world) containersOn(a *devcluster.Agent, i client.AppInstance) int {
	w.t.Helper()
	cl, err := containerd.New(w.containerd.Address, containerd.WithDefaultNamespace(a.Config.ContainerdNamespace))
	require.NoError(w.t, err)
	defer func() { require.NoError(w.t, cl.Close()) }()
	list, err := cl.Containers(w.ctx, fmt.Sprintf("labels.%q==%q", "gpuaas.instance", i.ID))
	require.NoError(w.t, err)
	return len(list)
}

// Law 9: a node that is gone for good is its own outcome. It comes back all the same: it is emptied, and the bill ends
// at its loss.
func TestLaw09ALostNodeIsAnOutcomeOfItsOwnAndIsHeardOnceMore(t *testing.T) {
	w := platform(t)
	s := w.adminShell()
	node := w.agent.Ready.NodeID
	containers := w.listen(w.agent.Config.ContainerdNamespace)
	i := w.launch("app")
	pid := w.pidOf(i)

	require.Equal(t, client.NodeStatusDraining, asJSON[client.Node](s, "nodes", "drain", node).Status)
	s.fails(6, "insufficient_capacity", "instances", "create", appSlug, "--project", "main", "--name", "late",
		"--allocation", w.allocation.ID)
	s.fails(6, "node_in_use", "nodes", "remove", node)
	s.fails(6, "node_connected", "nodes", "remove", node, "--lost")
	w.answers(i)
	require.Equal(t, client.NodeStatusOnline, asJSON[client.Node](s, "nodes", "undrain", node).Status)

	require.NoError(t, w.agent.Stop())
	w.eventually("the hub knows that the node hung up", func() error {
		n, err := client.Read[client.Node](w.tenant.Admin.GetNode(w.ctx, node))
		return orMissing(err, n.Status == client.NodeStatusOffline)
	})
	lost := asJSON[client.Node](s, "nodes", "remove", node, "--lost", "--reason", "burnt down")
	require.Equal(t, client.NodeStatusLost, lost.Status)
	require.Equal(t, "burnt down", lost.RemoveReason)
	got := w.instance(i.ID)
	require.Equal(t, client.AppInstanceStatusFailed, got.Status)
	require.Equal(t, client.StatusReasonNodeLost, got.StatusReason)
	a, err := client.Read[client.Allocation](w.operator.GetAllocation(w.ctx, w.tenant.Project.ID, w.allocation.ID))
	require.NoError(t, err)
	require.Equal(t, client.AllocationStatusNodeLost, a.Status)
	require.Equal(t, client.AppInstanceStatusDecommissioned, w.decommission(i).Status)
	require.Equal(t, []string{"requested", "deploying", "running", "failed", "decommission_requested", "decommissioned"},
		w.eventTypes(i.ID))
	require.Equal(t, pid, w.pidOf(i), "nobody was there to end it")

	w.restartAgent(w.agent)
	w.eventually("nothing of it runs any more", func() error { return orMissing(nil, w.containersOf(i) == 0) })
	var postings []client.Posting
	w.eventually("the node has said its last word", func() (err error) {
		postings, err = w.tenant.Postings(w.ctx, i.ID)
		return orMissing(err, hasKind(postings, client.PostingKindHoldClosed))
	})
	usage, err := w.tenant.Usage(w.ctx, i.ID)
	require.NoError(t, err)
	seconds := requireContiguous(t, usage, "session_seconds")
	containers.running(t) // it has exited
	requireWithinBeat(t, lost.RemovedAt.Sub(containers.firstStart()), seconds)
	paid := new(big.Rat).Sub(debit(t, postings), new(big.Rat).Mul(seconds, big.NewRat(1, 1000)))
	require.LessOrEqual(t, paid.Abs(paid).Cmp(big.NewRat(1, 1_000_000_000)), 0, "paid %s off", paid.FloatString(9))
	require.Equal(t, client.NodeStatusLost, asJSON[client.Node](s, "nodes", "get", node).Status,
		"it stays what it was declared")
}

// A node leaves in order, and one is shut out; what the second runs goes on as long as its lease does.
func TestARemovedAndABannedNodeAreShutOut(t *testing.T) {
	w := platform(t)
	s := w.adminShell()
	leaving := w.startAgent(w.agentConfig("leaving"))
	s.gpuaas("nodes", "drain", leaving.Ready.NodeID)
	require.Equal(t, client.NodeStatusRemoved, asJSON[client.Node](s, "nodes", "remove", leaving.Ready.NodeID).Status)
	w.isCutOff(leaving, "node_removed")

	node := w.agent.Ready.NodeID
	i := w.launch("app")
	pid := w.pidOf(i)
	require.Equal(t, client.NodeStatusBanned, asJSON[client.Node](s, "nodes", "ban", node, "--reason", "stolen").Status)
	w.isCutOff(w.agent, "node_banned")
	require.NoError(t, w.agent.Kill9())
	w.restartAgent(w.agent)
	w.isCutOff(w.agent, "node_banned")
	require.Equal(t, pid, w.pidOf(i))
	w.answers(i)
	s.gpuaas("nodes", "remove", node, "--lost")
	require.Equal(t, client.StatusReasonNodeLost, w.instance(i.ID).StatusReason)
	require.Len(t, asJSON[items[client.Node]](s, "nodes", "list", "--status", "removed").Items, 1)
	require.Len(t, asJSON[items[client.Node]](s, "nodes", "list", "--status", "banned").Items, 1,
		"banned stays the stronger word")
}
