package billing_test

import (
	"encoding/json"
	"math/big"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/e2e/harness"
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

func says(w *harness.Testbed, a *devcluster.Agent) (s nodeSays, err error) {
	out, err := exec.Command(filepath.Join(harness.Binaries(w.T), "gpuaas-agent"), "status", "-o", "json",
		"--local-socket",
		a.Ready.LocalSocket).Output()
	if err != nil {
		return s, err
	}
	return s, json.Unmarshal(out, &s)
}

// finalBill ends the instance and returns the seconds that were billed once nothing more can come.
func finalBill(w *harness.Testbed, i client.AppInstance) *big.Rat {
	w.T.Helper()
	w.Decommission(i)
	w.FinalPostings(i)
	usage, err := w.Tenant.Usage(w.Ctx, i.ID)
	require.NoError(w.T, err)
	return harness.SessionSeconds(w.T, usage)
}

// awaitHealthy waits until the hub shows the instance as running and healthy.
func awaitHealthy(w *harness.Testbed, i client.AppInstance) {
	w.T.Helper()
	w.Eventually("the hub shows the app as before", func() error {
		got, err := client.Read[client.AppInstance](w.Operator.GetAppInstance(w.Ctx, w.Tenant.Project.ID, i.ID))
		return harness.Pending(err, got.Status == client.AppInstanceStatusRunning &&
			got.Health == client.AppInstanceHealthHealthy)
	})
}

// Laws 2 and 5: an old copy of the node's disk is restored, and the agent works without the hub until it has sealed
// more segments than the hub has posted. The hub notices although the numbers fit; the store takes a new incarnation,
// the bill is what containerd saw, and nothing is stopped.
func TestLaw05ARestoredNodeDiskTakesANewIncarnationAndIsBilledOnce(t *testing.T) {
	w := harness.NewPlatform(t)
	data := w.Agent.Config.DataDir()
	backup := filepath.Join(w.Dir, "backup", "data")
	containers := w.WatchContainerd(w.Agent.Config.ContainerdNamespace)
	i := w.Launch("app")
	pid := w.PidOf(i)
	_, err := w.Tenant.AwaitCharge(w.Ctx, i.ID)
	require.NoError(t, err)

	require.NoError(t, w.Agent.Stop())
	w.CopyDisk(data, backup)
	w.RestartAgent(w.Agent)
	copied, err := says(w, w.Agent)
	require.NoError(t, err)
	var today nodeSays
	w.Eventually("the hub has posted what the copy does not know", func() (err error) {
		today, err = says(w, w.Agent)
		return harness.Pending(err, today.Usage.Marks.Posted > copied.Usage.LastSegment)
	})
	require.NoError(t, w.Agent.Stop())
	require.NoError(t, w.Hub.Kill9())
	w.Explain(harness.Faults{Why: "the copy measures again what is billed", Suspense: []string{"already_billed"}})
	w.CopyDisk(backup, data)
	w.RestartAgent(w.Agent)
	w.Eventually("the copy has sealed more than the hub has posted", func() error {
		s, err := says(w, w.Agent)
		require.Equal(t, today.Incarnation, s.Incarnation)
		return harness.Pending(err, s.Usage.LastSegment > today.Usage.LastSegment)
	})
	w.RestartHub()
	w.Eventually("the store takes a new incarnation, and its usage is posted", func() error {
		s, err := says(w, w.Agent)
		return harness.Pending(err, s.Incarnation != today.Incarnation && s.Usage.LastSegment > 0 &&
			s.Usage.Marks.Posted == s.Usage.LastSegment)
	})
	w.RequireAnswer(i)
	require.Equal(t, pid, w.PidOf(i), "nothing was stopped")
	awaitHealthy(w, i)
	bill := finalBill(w, i)
	containers.RequireBilledTime(t, "", bill)
}

// explainClone tells the audit what a clone does. In a minute the pauses of a node whose sessions do not last allow
// log2(2·60 s/DialRetryMin + 1) dials. The clone may start what its lease allows before it learns of the quarantine,
// and stops that when it is uninstalled.
func explainClone(w *harness.Testbed, clone devcluster.AgentConfig) {
	w.T.Helper()
	w.Explain(harness.Faults{
		Why:      "node and clone end each other's sessions, and both run the app",
		Sessions: 8,
		Restarts: 1,
		Suspense: []string{"already_billed"},
		Unbilled: harness.ConvergenceBound,
	})
	w.WatchForAudit(clone)
}

// Law 5: a node's disk is copied and a second machine started from it. The hub notices and gives neither anything new;
// both are told why, what runs goes on, and once the copy is shut down and the node released there is one bill.
func TestLaw05AClonedNodeIsQuarantinedAndBilledOnce(t *testing.T) {
	w := harness.New(t)
	net := w.NewNetwork("hub", "far")
	w.StartContainerd()
	w.StartHub(w.HubConfigIn(net))
	w.NewTenant("acme")
	w.Agent = w.StartAgent(w.AgentConfig("node"))
	w.ShipApp()
	w.Allocate(w.Agent)
	containers := w.WatchContainerd(w.Agent.Config.ContainerdNamespace)
	i := w.Launch("app")
	pid := w.PidOf(i)
	_, err := w.Tenant.AwaitCharge(w.Ctx, i.ID)
	require.NoError(t, err)

	second := w.AgentConfig("copy")
	second.NetNS = net.Path("far")
	require.NoError(t, w.Agent.Stop())
	w.CopyDisk(w.Agent.Config.DataDir(), second.DataDir())
	w.RestartAgent(w.Agent)
	node := func() (client.Node, error) {
		return client.Read[client.Node](w.Tenant.Admin.GetNode(w.Ctx, w.Agent.Ready.NodeID))
	}
	w.Eventually("the node is back", func() error {
		n, err := node()
		return harness.Pending(err, n.Status == client.NodeStatusOnline)
	})
	before, err := says(w, w.Agent)
	require.NoError(t, err)
	explainClone(w, second)
	clone, err := devcluster.StartAgent(w.Ctx, second)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, clone.Stop())
		require.NoError(t, devcluster.Uninstall(w.Ctx, second))
	})
	require.Equal(t, w.Agent.Ready.NodeID, clone.Ready.NodeID)

	w.Eventually("the node is quarantined, and the admin sees why", func() error {
		n, err := node()
		return harness.Pending(err, n.Status == client.NodeStatusQuarantined && n.QuarantineReason == reasonUsedTwice)
	})
	n, err := node()
	require.NoError(t, err)
	require.Contains(t, n.Conditions, reasonUsedTwice)
	for _, a := range []*devcluster.Agent{w.Agent, clone} {
		w.Eventually("each machine knows of the quarantine", func() error {
			s, err := says(w, a)
			return harness.Pending(err, s.Hub.Quarantined == reasonUsedTwice)
		})
	}
	w.RequireAnswer(i)
	require.Equal(t, pid, w.PidOf(i), "what runs goes on")

	require.NoError(t, clone.Stop())
	_, err = client.Read[client.Node](w.Tenant.Admin.ReleaseNode(w.Ctx, w.Agent.Ready.NodeID))
	require.NoError(t, err)
	w.Eventually("the machine that is left goes on under a new incarnation", func() error {
		s, err := says(w, w.Agent)
		if err != nil || s.Incarnation == before.Incarnation || s.Hub.Quarantined != "" {
			return harness.Pending(err, false)
		}
		n, err := node()
		return harness.Pending(err, n.Status == client.NodeStatusOnline)
	})
	awaitHealthy(w, i)
	require.Equal(t, pid, w.PidOf(i))
	bill := finalBill(w, i)
	containers.RequireBilledTime(t, "", bill)
}
