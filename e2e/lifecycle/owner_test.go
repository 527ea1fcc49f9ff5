package lifecycle_test

import (
	"crypto/ed25519"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/protocol"
)

// Law 15: the owner closes the machine, without a hub. Leased and paid apps stop and are not billed; hub and tenant
// learn it from the owner's signed refusal. Nothing starts until the owner opens the machine; then the apps go on.
func TestLaw15TheOwnersRefusalWins(t *testing.T) {
	w := harness.New(t)
	w.StartContainerd()
	w.StartHub(w.HubConfig())
	w.NewTenant("acme")
	w.GrantCredit()
	node := w.AgentConfig("node")
	file := filepath.Join(w.Dir, "policy.yaml")
	says := func(policy string) {
		next := file + ".next"
		require.NoError(t, os.WriteFile(next, []byte(policy), 0o600))
		require.NoError(t, os.Rename(next, file))
	}
	says("# Everything is welcome.\n")
	node.ExtraArgs = append(node.ExtraArgs, "--policy", file)
	w.Agent = w.StartAgent(node)
	w.ShipApp()
	w.Allocate(w.Agent)
	containers := w.WatchContainerd(node.ContainerdNamespace)
	running := w.Launch("running")
	w.RequireAnswer(running)
	pid := w.PidOf(running)

	w.Explain(harness.Faults{Why: "the owner closes the node for a while", Restarts: 1})
	require.NoError(t, w.Hub.Kill9())
	says("closed: true\n")
	w.Eventually("what ran has stopped without the hub", func() error {
		return harness.Pending(nil, errors.Is(unix.Kill(int(pid), 0), unix.ESRCH))
	})
	w.RestartHub()
	var refused client.AppInstance
	w.Eventually("the tenant sees the refusal", func() (err error) {
		refused, err = client.Read[client.AppInstance](w.Operator.GetAppInstance(w.Ctx, w.Tenant.Project.ID, running.ID))
		return harness.Pending(err, refused.StatusReason == client.StatusReasonOwnerRefused)
	})
	require.Equal(t, client.AppInstanceHealthUnhealthy, refused.Health)
	requireSignedByOwner(w, refused)
	launchWaits(w, "not here either", client.StatusReasonOwnerRefused)

	says("closed: fales\n")
	launchWaits(w, "a typing error opens nothing", client.StatusReasonOwnerRefused)
	says("largest_workload: {cpu_millis: 1}\n")
	launchWaits(w, "too large", client.StatusReasonOwnerRefused)
	says("orgs: {only: [acme]}\n")
	w.Eventually("it runs again", func() (err error) {
		refused, err = client.Read[client.AppInstance](w.Operator.GetAppInstance(w.Ctx, w.Tenant.Project.ID, running.ID))
		return harness.Pending(err, refused.Health == client.AppInstanceHealthHealthy)
	})
	require.Empty(t, refused.Members[0].OwnerRefusal)
	w.RequireAnswer(refused)

	w.Decommission(refused)
	w.RequireRuns(containers, running, 2)
}

// requireSignedByOwner verifies the refusal that the tenant sees with the node's key.
func requireSignedByOwner(w *harness.Testbed, i client.AppInstance) {
	w.T.Helper()
	var key []byte
	require.NoError(w.T, w.Database().QueryRow(w.Ctx, `SELECT public_key FROM nodes WHERE id = $1`, w.Agent.Ready.NodeID).
		Scan(&key))
	m := i.Members[0]
	require.Contains(w.T, m.Detail, "accepts no workloads")
	env := &protocol.Envelope{}
	require.NoError(w.T, proto.Unmarshal(m.OwnerRefusal, env))
	status := &protocol.WorkloadStatus{
		MemberId: m.ID, InstanceId: i.ID, Revision: uint64(i.Revision), Status: protocol.WorkloadStatus_FAILED,
		OwnerRefusal: env,
	}
	v, err := protocol.VerifyOwnerRefusal(status, w.Agent.Ready.NodeID, ed25519.PublicKey(key))
	require.NoError(w.T, err)
	require.Equal(w.T, m.Detail, v.Message().GetRule())
}

// launchWaits creates an instance that does not run for a reason that passes, and decommissions it.
func launchWaits(w *harness.Testbed, name string, reason client.StatusReason) {
	w.T.Helper()
	i, err := client.Read[client.AppInstance](w.Operator.CreateAppInstance(w.Ctx, w.Tenant.Project.ID,
		client.AppInstanceCreate{
			AppSlug: harness.AppSlug, Version: "1.0.0", DisplayName: name, PlacementIntent: client.PlacementIntent{
				AllocationIds: []string{w.Allocation.ID},
			},
		}))
	require.NoError(w.T, err)
	w.Eventually("the tenant sees why it waits", func() (err error) {
		i, err = client.Read[client.AppInstance](w.Operator.GetAppInstance(w.Ctx, w.Tenant.Project.ID, i.ID))
		return harness.Pending(err, i.StatusReason == reason)
	})
	require.Equal(w.T, client.AppInstanceStatusDeploying, i.Status)
	w.Decommission(i)
}
