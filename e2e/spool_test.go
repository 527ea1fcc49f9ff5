package e2e_test

import (
	"encoding/json"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// reasonUsedTwice is why a cloned node is quarantined.
const reasonUsedTwice = "identity_used_twice"

// nodeSays is what an agent tells the owner of its machine.
type nodeSays struct {
	Incarnation string `json:"incarnation"`
	Hub         struct {
		Quarantined string `json:"quarantined"`
	} `json:"hub"`
	Usage struct {
		LastSegment uint64
		Marks       struct {
			Posted uint64 `json:"posted"`
		}
	} `json:"usage"`
}

func (w *world) says(a *devcluster.Agent) (s nodeSays, err error) {
	out, err := exec.Command(filepath.Join(binaries(w.t), "gpuaas-agent"), "status", "-o", "json", "--local-socket",
		a.Ready.LocalSocket).Output()
	if err != nil {
		return s, err
	}
	return s, json.Unmarshal(out, &s)
}

// copyDisk copies a stopped agent's data directory, keys and all, as an image of the disk would have it.
func (w *world) copyDisk(from, to string) {
	w.t.Helper()
	require.NoError(w.t, os.RemoveAll(to))
	require.NoError(w.t, os.MkdirAll(filepath.Dir(to), 0o700))
	out, err := exec.Command("cp", "-a", from, to).CombinedOutput()
	require.NoError(w.t, err, "%s", out)
}

// finalBill ends the instance and returns the seconds that were billed once nothing more can come.
func (w *world) finalBill(i client.AppInstance) *big.Rat {
	w.t.Helper()
	w.decommission(i)
	w.eventually("the bill is final", func() error {
		postings, err := w.tenant.Postings(w.ctx, i.ID)
		return orMissing(err, hasKind(postings, client.PostingKindHoldClosed))
	})
	usage, err := w.tenant.Usage(w.ctx, i.ID)
	require.NoError(w.t, err)
	total := new(big.Rat)
	for _, r := range usage {
		if r.Meter != "session_seconds" {
			continue
		}
		q, ok := new(big.Rat).SetString(r.Quantity)
		require.True(w.t, ok)
		total.Add(total, q)
	}
	return total
}

// Laws 2 and 5: yesterday's disk is put back, and goes on without the hub until it has sealed more than the hub has
// posted. By numbers alone it could be the old one; it is noticed, takes a new incarnation, and the bill is the truth.
// Nothing is stopped.
func TestLaw05ADiskFromYesterdayTakesANewIncarnationAndIsBilledOnce(t *testing.T) {
	w := platform(t)
	data := w.agent.Config.DataDir()
	yesterday := filepath.Join(w.dir, "yesterday", "data")
	containers := w.listen(w.agent.Config.ContainerdNamespace)
	i := w.launch("app")
	pid := w.pidOf(i)
	_, err := w.tenant.AwaitCharge(w.ctx, i.ID)
	require.NoError(t, err)

	require.NoError(t, w.agent.Stop())
	w.copyDisk(data, yesterday)
	w.restartAgent(w.agent)
	copied, err := w.says(w.agent)
	require.NoError(t, err)
	var today nodeSays
	w.eventually("the hub has posted what the copy does not know", func() (err error) {
		today, err = w.says(w.agent)
		return orMissing(err, today.Usage.Marks.Posted > copied.Usage.LastSegment)
	})
	require.NoError(t, w.agent.Stop())
	require.NoError(t, w.hub.Kill9())
	w.copyDisk(yesterday, data)
	w.restartAgent(w.agent)
	w.eventually("the copy has sealed more than the hub has posted", func() error {
		s, err := w.says(w.agent)
		require.Equal(t, today.Incarnation, s.Incarnation)
		return orMissing(err, s.Usage.LastSegment > today.Usage.LastSegment)
	})
	w.restartHub()
	w.eventually("the store takes a new incarnation, and its usage is posted", func() error {
		s, err := w.says(w.agent)
		return orMissing(err, s.Incarnation != today.Incarnation && s.Usage.LastSegment > 0 &&
			s.Usage.Marks.Posted == s.Usage.LastSegment)
	})
	w.answers(i)
	require.Equal(t, pid, w.pidOf(i), "nothing was stopped")
	w.eventually("the hub hears of it as before", func() error {
		got, err := client.Read[client.AppInstance](w.operator.GetAppInstance(w.ctx, w.tenant.Project.ID, i.ID))
		return orMissing(err, got.Status == client.AppInstanceStatusRunning && got.Health == client.AppInstanceHealthHealthy)
	})
	bill := w.finalBill(i)
	requireWithinBeat(t, containers.running(t), bill)
}

// Law 5: a node's disk is copied and a second machine started from it. The hub notices and gives neither anything new;
// both are told why, what runs goes on, and once the copy is shut down and the node released there is one bill.
func TestLaw05AClonedNodeIsQuarantinedAndBilledOnce(t *testing.T) {
	w := newWorld(t)
	net := w.newNetwork("hub", "far")
	w.startContainerd()
	w.startHub(w.hubConfigIn(net))
	w.newTenant("acme")
	w.agent = w.startAgent(w.agentConfig("node"))
	w.shipApp()
	w.allocate(w.agent)
	containers := w.listen(w.agent.Config.ContainerdNamespace)
	i := w.launch("app")
	pid := w.pidOf(i)
	_, err := w.tenant.AwaitCharge(w.ctx, i.ID)
	require.NoError(t, err)

	second := w.agentConfig("copy")
	second.NetNS = net.path("far")
	require.NoError(t, w.agent.Stop())
	w.copyDisk(w.agent.Config.DataDir(), second.DataDir())
	w.restartAgent(w.agent)
	node := func() (client.Node, error) {
		return client.Read[client.Node](w.tenant.Admin.GetNode(w.ctx, w.agent.Ready.NodeID))
	}
	w.eventually("the node is back", func() error {
		n, err := node()
		return orMissing(err, n.Status == client.NodeStatusOnline)
	})
	before, err := w.says(w.agent)
	require.NoError(t, err)
	clone, err := devcluster.StartAgent(w.ctx, second)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, clone.Stop())
		require.NoError(t, devcluster.Uninstall(w.ctx, second))
	})
	require.Equal(t, w.agent.Ready.NodeID, clone.Ready.NodeID)

	w.eventually("the node is quarantined, and the admin sees why", func() error {
		n, err := node()
		return orMissing(err, n.Status == client.NodeStatusQuarantined && n.QuarantineReason == reasonUsedTwice)
	})
	n, err := node()
	require.NoError(t, err)
	require.Contains(t, n.Conditions, reasonUsedTwice)
	for _, a := range []*devcluster.Agent{w.agent, clone} {
		w.eventually("each machine is told", func() error {
			s, err := w.says(a)
			return orMissing(err, s.Hub.Quarantined == reasonUsedTwice)
		})
	}
	w.answers(i)
	require.Equal(t, pid, w.pidOf(i), "what runs goes on")

	require.NoError(t, clone.Stop())
	_, err = client.Read[client.Node](w.tenant.Admin.ReleaseNode(w.ctx, w.agent.Ready.NodeID))
	require.NoError(t, err)
	w.eventually("the machine that is left goes on under a new incarnation", func() error {
		s, err := w.says(w.agent)
		if err != nil || s.Incarnation == before.Incarnation || s.Hub.Quarantined != "" {
			return orMissing(err, false)
		}
		n, err := node()
		return orMissing(err, n.Status == client.NodeStatusOnline)
	})
	w.eventually("the app is as before", func() error {
		got, err := client.Read[client.AppInstance](w.operator.GetAppInstance(w.ctx, w.tenant.Project.ID, i.ID))
		return orMissing(err, got.Status == client.AppInstanceStatusRunning && got.Health == client.AppInstanceHealthHealthy)
	})
	require.Equal(t, pid, w.pidOf(i))
	bill := w.finalBill(i)
	requireWithinBeat(t, containers.running(t), bill)
}
