package recovery_test

import (
	"math/big"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	api "github.com/gpuaas/gpuaas/pkg/client"
)

// Law 16: the hub's disk is lost, and the hub is restored from a backup that lacks later changes. Nothing that runs is
// stopped, instances created or changed after the backup stay as they are, and every second is billed once.
func TestLaw16ARestoredHubStopsNothingAndRebuildsFromItsNodes(t *testing.T) {
	w := harness.NewPlatform(t)
	away := w.StartAgent(w.AgentConfig("away"))
	reserved, err := w.Tenant.Allocate(w.Ctx, w.Tenant.Admin, away.Ready.NodeID, 1, 256)
	require.NoError(t, err)
	w.ShipVersion("2.0.0", harness.FirstGreeting, harness.SecondGreeting)
	w.GrantCredit()
	containers := w.WatchContainerd(w.Agent.Config.ContainerdNamespace)
	kept, changed := w.Launch("kept"), w.Launch("changed")
	w.Allocate(w.Agent)
	ended := w.Launch("ended")
	_, err = w.Tenant.AwaitCharge(w.Ctx, kept.ID)
	require.NoError(t, err)

	file := filepath.Join(w.Dir, "backup.age")
	require.NoError(t, devcluster.Backup(w.Ctx, w.Hub.Config, file))
	info, err := os.Stat(file)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode())

	w.Decommission(ended)
	made := w.Launch("made")
	changed, err = w.Tenant.Upgrade(w.Ctx, w.Operator, changed.ID, "2.0.0", nil)
	require.NoError(t, err)
	before, err := w.Tenant.Usage(w.Ctx, kept.ID)
	require.NoError(t, err)
	w.Eventually("usage that the backup does not have is posted", func() error {
		after, err := w.Tenant.Usage(w.Ctx, kept.ID)
		return harness.Pending(err, len(after) > len(before))
	})
	require.NoError(t, away.Stop())
	w.Explain(harness.Faults{Why: "the backup lacks the request for an upgrade", Restarts: 1})

	running := []api.AppInstance{kept, changed, made}
	pids := map[string]uint32{}
	var serving []func() error
	for _, i := range running {
		pids[i.ID] = w.PidOf(i)
		serving = append(serving, w.KeepCalling(i))
	}
	require.NoError(t, w.Hub.Kill9())
	require.NoError(t, devcluster.Destroy(w.Ctx, w.Hub.Config))
	require.NoError(t, devcluster.Restore(w.Ctx, w.Hub.Config, file))
	w.RestartHub()

	w.Eventually("the node has uploaded the state that it holds", func() error {
		r, err := recovery(w)
		return harness.Pending(err, len(r.Waiting) == 1 && r.Waiting[0].NodeID == away.Ready.NodeID)
	})
	awaitAdopted(w, running, ended)
	foundOnly(w, map[string]api.RecoveryFindingKind{
		kept.ID: "", changed.ID: api.RecoveryFindingKindRevisionUnknown, made.ID: api.RecoveryFindingKindInstanceUnknown,
		ended.ID: api.RecoveryFindingKindInstanceDecommissioned,
	})
	still, err := api.Read[api.Allocation](w.Operator.GetAllocation(w.Ctx, w.Tenant.Project.ID, reserved.ID))
	require.NoError(t, err)
	require.Equal(t, api.AllocationStatusActive, still.Status, "what is not adopted yet keeps its capacity")
	w.RestartAgent(away)
	w.Eventually("the last node is back", func() error {
		r, err := recovery(w)
		return harness.Pending(err, len(r.Waiting) == 0)
	})
	for n, i := range running {
		require.NoError(t, serving[n](), "%s answered throughout", i.DisplayName)
		require.Equal(t, pids[i.ID], w.PidOf(i), "%s is the very process", i.DisplayName)
	}
	billedOnce(w, containers, ended, running)
}

// awaitAdopted waits until the restored hub shows what runs, and what was decommissioned after the backup.
func awaitAdopted(w *harness.Testbed, running []api.AppInstance, ended api.AppInstance) {
	w.T.Helper()
	for _, i := range running {
		w.Eventually(i.DisplayName+" is seen running", func() error {
			got, err := api.Read[api.AppInstance](w.Operator.GetAppInstance(w.Ctx, w.Tenant.Project.ID, i.ID))
			return harness.Pending(err, got.Status == api.AppInstanceStatusRunning &&
				got.Health == api.AppInstanceHealthHealthy &&
				got.Version == i.Version)
		})
	}
	w.Eventually("what was decommissioned is so again", func() error {
		got, err := api.Read[api.AppInstance](w.Operator.GetAppInstance(w.Ctx, w.Tenant.Project.ID, ended.ID))
		return harness.Pending(err, got.Status == api.AppInstanceStatusDecommissioned)
	})
}

// billedOnce ends what runs and compares all bills with containerd's times.
func billedOnce(w *harness.Testbed, containers *harness.ContainerdOracle, ended api.AppInstance,
	running []api.AppInstance,
) {
	w.T.Helper()
	for _, i := range running {
		w.Decommission(i)
	}
	all := new(big.Rat)
	for _, i := range append(running, ended) {
		postings := w.FinalPostings(i)
		usage, err := w.Tenant.Usage(w.Ctx, i.ID)
		require.NoError(w.T, err)
		seconds := harness.SessionSeconds(w.T, usage)
		all.Add(all, seconds)
		harness.RequireCost(w.T, postings, seconds, 5)
	}
	// The tenant is never billed for more than what ran.
	containers.RequireBilledRuns(w.T, "", len(running)+2, all)
}

func recovery(w *harness.Testbed) (api.Recovery, error) {
	return api.Read[api.Recovery](w.Tenant.Admin.GetRecovery(w.Ctx))
}

// foundOnly compares the findings with those expected for each instance; empty for none.
func foundOnly(w *harness.Testbed, want map[string]api.RecoveryFindingKind) {
	w.T.Helper()
	r, err := recovery(w)
	require.NoError(w.T, err)
	require.False(w.T, r.RestoredAt.IsZero())
	require.Greater(w.T, r.Epoch, int64(1))
	got := map[string]api.RecoveryFindingKind{}
	for id := range want {
		got[id] = ""
	}
	for _, f := range r.Findings {
		if f.ResourceType == "app_instance" {
			got[f.ResourceID] = f.Kind
		}
	}
	require.Equal(w.T, want, got)
}

// The admin's token is lost. The root user of the hub's machine makes a new one, whether the hub runs or not; the old
// one ends.
func TestALostAdminTokenIsRecoveredOnTheHubsMachine(t *testing.T) {
	w := harness.New(t)
	w.StartHub(w.HubConfig())
	for name, running := range map[string]bool{"while the hub runs": true, "while it does not": false} {
		old, err := scenario.Admin(w.Hub.Ready)
		require.NoError(t, err)
		require.NoError(t, os.Remove(w.Hub.Ready.TokenFile))
		if !running {
			require.NoError(t, w.Hub.Stop())
		}
		require.NoError(t, devcluster.AdminToken(w.Ctx, w.Hub.Config), name)
		if !running {
			w.RestartHub()
		}
		info, err := os.Stat(w.Hub.Ready.TokenFile)
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o600), info.Mode(), name)
		fresh, err := scenario.Admin(w.Hub.Ready)
		require.NoError(t, err)
		_, err = api.Read[api.OrgList](fresh.ListOrgs(w.Ctx, &api.ListOrgsParams{}))
		require.NoError(t, err, name)
		_, err = api.Read[api.OrgList](old.ListOrgs(w.Ctx, &api.ListOrgsParams{}))
		require.ErrorContains(t, err, "unauthenticated", "the old token no longer counts (%s)", name)
	}
}
