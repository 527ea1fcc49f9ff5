package e2e_test

import (
	"crypto/ed25519"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/protocol"
)

// Law 15: the owner closes the machine. What runs there stops although it is leased and paid, and although no hub is
// there to agree, and is not billed; hub and tenant learn it from the owner's signed word. Nothing starts there until
// the owner opens it again; then what was stopped goes on.
func TestLaw15TheOwnersRefusalWins(t *testing.T) {
	w := newWorld(t)
	w.startContainerd()
	w.startHub(w.hubConfig())
	w.newTenant("acme")
	_, err := client.Read[client.Posting](w.tenant.Admin.GrantCredit(w.ctx, client.CreditGrant{
		OrgID:  w.tenant.Org.ID,
		Amount: "9000", Currency: scenario.Currency, Description: "leases of what is refused",
	}))
	require.NoError(t, err)
	node := w.agentConfig("node")
	file := filepath.Join(w.dir, "policy.yaml")
	says := func(policy string) {
		next := file + ".next"
		require.NoError(t, os.WriteFile(next, []byte(policy), 0o600))
		require.NoError(t, os.Rename(next, file))
	}
	says("# Everything is welcome.\n")
	node.ExtraArgs = append(node.ExtraArgs, "--policy", file)
	w.agent = w.startAgent(node)
	w.shipApp()
	w.allocate(w.agent)
	containers := w.listen(node.ContainerdNamespace)
	running := w.launch("running")
	w.answers(running)
	pid := w.pidOf(running)

	require.NoError(t, w.hub.Kill9())
	says("closed: true\n")
	w.eventually("what ran has stopped without the hub", func() error {
		return orMissing(nil, errors.Is(unix.Kill(int(pid), 0), unix.ESRCH))
	})
	w.restartHub()
	var refused client.AppInstance
	w.eventually("the tenant is told", func() (err error) {
		refused, err = client.Read[client.AppInstance](w.operator.GetAppInstance(w.ctx, w.tenant.Project.ID, running.ID))
		return orMissing(err, refused.StatusReason == client.StatusReasonOwnerRefused)
	})
	require.Equal(t, client.AppInstanceHealthUnhealthy, refused.Health)
	w.requireSignedByOwner(refused)
	w.launchWaits("not here either", client.StatusReasonOwnerRefused)

	says("closed: fales\n")
	w.launchWaits("a typing error opens nothing", client.StatusReasonOwnerRefused)
	says("largest_workload: {cpu_millis: 1}\n")
	w.launchWaits("too large", client.StatusReasonOwnerRefused)
	says("orgs: {only: [acme]}\n")
	w.eventually("it runs again", func() (err error) {
		refused, err = client.Read[client.AppInstance](w.operator.GetAppInstance(w.ctx, w.tenant.Project.ID, running.ID))
		return orMissing(err, refused.Health == client.AppInstanceHealthHealthy)
	})
	require.Empty(t, refused.Members[0].OwnerRefusal)
	w.answers(refused)

	w.decommission(refused)
	w.requireRuns(containers, running.ID, 2)
}

// requireSignedByOwner holds what the tenant was shown against the key of the node.
func (w *world) requireSignedByOwner(i client.AppInstance) {
	w.t.Helper()
	var key []byte
	require.NoError(w.t, w.database().QueryRow(w.ctx, `SELECT public_key FROM nodes WHERE id = $1`, w.agent.Ready.NodeID).
		Scan(&key))
	m := i.Members[0]
	require.Contains(w.t, m.Detail, "accepts no workloads")
	env := &protocol.Envelope{}
	require.NoError(w.t, proto.Unmarshal(m.OwnerRefusal, env))
	status := &protocol.WorkloadStatus{
		MemberId: m.ID, InstanceId: i.ID, Revision: uint64(i.Revision), Status: "failed",
		OwnerRefusal: env,
	}
	v, err := protocol.VerifyOwnerRefusal(status, w.agent.Ready.NodeID, ed25519.PublicKey(key))
	require.NoError(w.t, err)
	require.Equal(w.t, m.Detail, v.Message().GetRule())
}

// launchWaits creates an instance that does not run for a reason that passes, and decommissions it.
func (w *world) launchWaits(name string, reason client.StatusReason) {
	w.t.Helper()
	i, err := client.Read[client.AppInstance](w.operator.CreateAppInstance(w.ctx, w.tenant.Project.ID,
		client.AppInstanceCreate{
			AppSlug: appSlug, Version: "1.0.0", DisplayName: name, PlacementIntent: client.PlacementIntent{
				AllocationIds: []string{w.allocation.ID},
			},
		}))
	require.NoError(w.t, err)
	w.eventually("the tenant is told why it waits", func() (err error) {
		i, err = client.Read[client.AppInstance](w.operator.GetAppInstance(w.ctx, w.tenant.Project.ID, i.ID))
		return orMissing(err, i.StatusReason == reason)
	})
	require.Equal(w.t, client.AppInstanceStatusDeploying, i.Status)
	w.decommission(i)
}
