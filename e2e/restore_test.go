package e2e_test

import (
	"math/big"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	api "github.com/gpuaas/gpuaas/pkg/client"
)

// Law 16: the hub's disk is lost, and the hub comes back from a backup that knows nothing of what was asked for since.
// Nothing that runs is stopped, what was asked for since stays as it is, and every second is billed once.
func TestLaw16ARestoredHubStopsNothingAndRebuildsFromItsNodes(t *testing.T) {
	w := platform(t)
	away := w.startAgent(w.agentConfig("away"))
	reserved, err := w.tenant.Allocate(w.ctx, w.tenant.Admin, away.Ready.NodeID, 1, 256)
	require.NoError(t, err)
	w.shipVersion("2.0.0", firstGreeting, secondGreeting)
	// Each lease of a week holds some 600.
	_, err = api.Read[api.Posting](w.tenant.Admin.GrantCredit(w.ctx, api.CreditGrant{
		OrgID:  w.tenant.Org.ID,
		Amount: "9000", Currency: scenario.Currency, Description: "more",
	}))
	require.NoError(t, err)
	containers := w.listen(w.agent.Config.ContainerdNamespace)
	kept, changed := w.launch("kept"), w.launch("changed")
	w.allocate(w.agent)
	ended := w.launch("ended")
	_, err = w.tenant.AwaitCharge(w.ctx, kept.ID)
	require.NoError(t, err)

	file := filepath.Join(w.dir, "backup.age")
	require.NoError(t, devcluster.Backup(w.ctx, w.hub.Config, file))
	info, err := os.Stat(file)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode())

	w.decommission(ended)
	made := w.launch("made")
	changed, err = w.tenant.Upgrade(w.ctx, w.operator, changed.ID, "2.0.0", nil)
	require.NoError(t, err)
	before, err := w.tenant.Usage(w.ctx, kept.ID)
	require.NoError(t, err)
	w.eventually("usage that the backup does not have is posted", func() error {
		after, err := w.tenant.Usage(w.ctx, kept.ID)
		return orMissing(err, len(after) > len(before))
	})
	require.NoError(t, away.Stop())

	running := []api.AppInstance{kept, changed, made}
	pids := map[string]uint32{}
	var serving []func() error
	for _, i := range running {
		pids[i.ID] = w.pidOf(i)
		serving = append(serving, w.keepAsking(i))
	}
	require.NoError(t, w.hub.Kill9())
	require.NoError(t, devcluster.Destroy(w.ctx, w.hub.Config))
	require.NoError(t, devcluster.Restore(w.ctx, w.hub.Config, file))
	w.restartHub()

	w.eventually("the node has brought what it was told", func() error {
		r, err := w.recovery()
		return orMissing(err, len(r.Waiting) == 1 && r.Waiting[0].NodeID == away.Ready.NodeID)
	})
	for _, i := range running {
		w.eventually(i.DisplayName+" is seen running", func() error {
			got, err := api.Read[api.AppInstance](w.operator.GetAppInstance(w.ctx, w.tenant.Project.ID, i.ID))
			return orMissing(err, got.Status == api.AppInstanceStatusRunning && got.Health == api.AppInstanceHealthHealthy &&
				got.Version == i.Version)
		})
	}
	w.eventually("what was decommissioned is so again", func() error {
		got, err := api.Read[api.AppInstance](w.operator.GetAppInstance(w.ctx, w.tenant.Project.ID, ended.ID))
		return orMissing(err, got.Status == api.AppInstanceStatusDecommissioned)
	})
	w.foundOnly(map[string]api.RecoveryFindingKind{
		kept.ID: "", changed.ID: api.RecoveryFindingKindRevisionUnknown, made.ID: api.RecoveryFindingKindInstanceUnknown,
		ended.ID: api.RecoveryFindingKindInstanceDecommissioned,
	})
	still, err := api.Read[api.Allocation](w.operator.GetAllocation(w.ctx, w.tenant.Project.ID, reserved.ID))
	require.NoError(t, err)
	require.Equal(t, api.AllocationStatusActive, still.Status, "what was not heard of keeps its capacity")
	w.restartAgent(away)
	w.eventually("the last node is back", func() error {
		r, err := w.recovery()
		return orMissing(err, len(r.Waiting) == 0)
	})
	for n, i := range running {
		require.NoError(t, serving[n](), "%s answered throughout", i.DisplayName)
		require.Equal(t, pids[i.ID], w.pidOf(i), "%s is the very process", i.DisplayName)
	}
	w.billedOnce(containers, ended, running)
}

// billedOnce ends what runs and holds all bills against containerd's own times.
func (w *world) billedOnce(containers *truth, ended api.AppInstance, running []api.AppInstance) {
	w.t.Helper()
	for _, i := range running {
		w.decommission(i)
	}
	all := new(big.Rat)
	for _, i := range append(running, ended) {
		var postings []api.Posting
		w.eventually("the bill of "+i.DisplayName+" is final", func() (err error) {
			postings, err = w.tenant.Postings(w.ctx, i.ID)
			return orMissing(err, hasKind(postings, api.PostingKindHoldClosed))
		})
		usage, err := w.tenant.Usage(w.ctx, i.ID)
		require.NoError(w.t, err)
		seconds := sessionSeconds(w.t, usage)
		all.Add(all, seconds)
		off := new(big.Rat).Sub(debit(w.t, postings), new(big.Rat).Mul(seconds, big.NewRat(1, 1000)))
		require.LessOrEqual(w.t, off.Abs(off).Cmp(big.NewRat(5, 1_000_000_000)), 0, "%s: %s for %s s", i.DisplayName,
			debit(w.t, postings).FloatString(9), seconds.FloatString(6))
	}
	ran := containers.running(w.t)
	truth := big.NewRat(ran.Microseconds(), 1_000_000)
	// Each run may lose its last beat; and the tenant is never billed more than what ran.
	runs := int64(len(running) + 2)
	least := new(big.Rat).Sub(truth, big.NewRat(runs*(beat.Microseconds()+250_000), 1_000_000))
	require.GreaterOrEqual(w.t, all.Cmp(least), 0, "billed %s s of %s", all.FloatString(3), ran)
	require.LessOrEqual(w.t, all.Cmp(new(big.Rat).Add(truth, big.NewRat(runs, 4))), 0, "billed %s s of %s",
		all.FloatString(3), ran)
}

func sessionSeconds(t *testing.T, records []api.UsageRecord) *big.Rat {
	t.Helper()
	total := new(big.Rat)
	for _, r := range records {
		if r.Meter != "session_seconds" {
			continue
		}
		q, ok := new(big.Rat).SetString(r.Quantity)
		require.True(t, ok)
		total.Add(total, q)
	}
	return total
}

func (w *world) recovery() (api.Recovery, error) {
	return api.Read[api.Recovery](w.tenant.Admin.GetRecovery(w.ctx))
}

// foundOnly holds the findings against what is expected for each instance; empty for none.
func (w *world) foundOnly(want map[string]api.RecoveryFindingKind) {
	w.t.Helper()
	r, err := w.recovery()
	require.NoError(w.t, err)
	require.False(w.t, r.RestoredAt.IsZero())
	require.EqualValues(w.t, 2, r.Epoch)
	got := map[string]api.RecoveryFindingKind{}
	for id := range want {
		got[id] = ""
	}
	for _, f := range r.Findings {
		if f.ResourceType == "app_instance" {
			got[f.ResourceID] = f.Kind
		}
	}
	require.Equal(w.t, want, got)
}

// The admin's token is lost. Whoever is root on the hub's machine makes a new one, whether the hub runs or not; the old
// one ends.
func TestALostAdminTokenIsRecoveredOnTheHubsMachine(t *testing.T) {
	w := newWorld(t)
	w.startHub(w.hubConfig())
	for name, running := range map[string]bool{"while the hub runs": true, "while it does not": false} {
		old, err := scenario.Admin(w.hub.Ready)
		require.NoError(t, err)
		require.NoError(t, os.Remove(w.hub.Ready.TokenFile))
		if !running {
			require.NoError(t, w.hub.Stop())
		}
		require.NoError(t, devcluster.AdminToken(w.ctx, w.hub.Config), name)
		if !running {
			w.restartHub()
		}
		info, err := os.Stat(w.hub.Ready.TokenFile)
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o600), info.Mode(), name)
		fresh, err := scenario.Admin(w.hub.Ready)
		require.NoError(t, err)
		_, err = api.Read[api.OrgList](fresh.ListOrgs(w.ctx, &api.ListOrgsParams{}))
		require.NoError(t, err, name)
		_, err = api.Read[api.OrgList](old.ListOrgs(w.ctx, &api.ListOrgsParams{}))
		require.ErrorContains(t, err, "unauthenticated", "the old token no longer counts (%s)", name)
	}
}
