package periodic_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/periodic"
)

// renewals is a pass with pages of ten members, which counts what it did.
type renewals struct {
	periodic.RenewLeases
	renewed, notRenewed atomic.Int64
}

func newRenewals(w *world) *renewals {
	r := &renewals{}
	r.RenewLeases = periodic.RenewLeases{
		Passes: w.passes(), LeaseDuration: time.Hour,
		Renewed: func(ledger.Row) { r.renewed.Add(1) }, NotRenewed: func(ledger.Row) { r.notRenewed.Add(1) },
	}
	r.WithPages(10)
	return r
}

func (w *world) grant(org string) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, err := ledger.GrantCredit(ctx, tx, ledger.Grant{
			OrgID: org, Currency: "EUR", Nanos: 1000 * 1_000_000_000,
			Key: db.NewID(),
		}, w.Now)
		return err
	})
}

// rich opens a member of another org, which has money, on a node of its own.
func (w *world) rich() (member string) {
	w.T.Helper()
	project, _ := w.NewTenant("rich")
	w.grant(project.OrgID)
	s := ledger.Subject{
		ID: db.NewID(), Kind: ledger.Member, OrgID: project.OrgID, ProjectID: project.ID,
		NodeID: db.NewID(), SKU: "cpu-2", OpenedAt: w.Now,
	}
	w.Tx(func(ctx context.Context, tx db.Tx) error { return ledger.OpenSubject(ctx, tx, s) })
	return s.ID
}

func (w *world) leases(member string) int {
	w.T.Helper()
	return w.Count(`SELECT count(*) FROM leases WHERE subject_id = $1`, member)
}

// Members whose org cannot pay are tried once each in a pass, wait with growing pauses, and hold up nobody; credit ends
// their pause.
func TestMembersThatCannotPayHoldUpNobodysRenewal(t *testing.T) {
	const broke = 35
	w := newWorld(t)
	w.Subjects(ledger.Member, broke)
	w.Exec(`UPDATE wallets SET balance_nanos = 0`)
	w.Now = w.Now.Add(time.Minute)
	rich := w.rich()
	r := newRenewals(w)
	first := false
	r.Renewed = func(row ledger.Row) { first = r.notRenewed.Load() < 10 && row.ID == rich }
	require.NoError(t, r.Do(t.Context(), w.Now))
	require.Equal(t, 1, w.leases(rich))
	require.True(t, first, "each org has its turn in the first page, whichever is due longest")
	require.EqualValues(t, broke, r.notRenewed.Load())
	require.Empty(t, w.Findings(), "an empty wallet is no finding")

	require.NoError(t, r.Do(t.Context(), w.Now))
	require.EqualValues(t, broke, r.notRenewed.Load(), "they wait before they are tried again")
	w.Now = w.Now.Add(time.Minute)
	require.NoError(t, r.Do(t.Context(), w.Now))
	require.EqualValues(t, 2*broke, r.notRenewed.Load())
	w.Now = w.Now.Add(time.Minute)
	require.NoError(t, r.Do(t.Context(), w.Now))
	require.EqualValues(t, 2*broke, r.notRenewed.Load(), "longer each time")

	r = newRenewals(w)
	w.grant(w.Project.OrgID)
	require.NoError(t, r.Do(t.Context(), w.Now))
	require.EqualValues(t, broke, r.renewed.Load())
	require.Zero(t, w.Count(`SELECT count(*) FROM subjects WHERE failures > 0`))
}

// After a restore, members of nodes that have not come back wait; they fill no page.
func TestMembersOfNodesThatARestoredHubWaitsForHoldUpNobodysRenewal(t *testing.T) {
	w := newWorld(t)
	w.Subjects(ledger.Member, 25)
	w.Tx(func(ctx context.Context, tx db.Tx) error { return fleet.AwaitResync(ctx, tx, w.Node) })
	w.Now = w.Now.Add(time.Minute)
	rich := w.rich()
	r := newRenewals(w)
	require.NoError(t, r.Do(t.Context(), w.Now))
	require.Equal(t, 1, w.leases(rich))
	require.Equal(t, 1, w.Count(`SELECT count(*) FROM leases`))
	require.Zero(t, r.notRenewed.Load())
}

// Of two machines with one key, neither gets a lease until an admin has released the node.
func TestAQuarantinedNodeGetsNoLease(t *testing.T) {
	w := newWorld(t)
	member := w.Subjects(ledger.Member, 1)[0]
	renew := func() int {
		t.Helper()
		require.NoError(t, newRenewals(w).Do(t.Context(), w.Now))
		return w.leases(member)
	}
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, _, err := fleet.Quarantine(ctx, tx, w.Node, fleet.ReasonIdentityUsedTwice, w.Now)
		return err
	})
	require.Zero(t, renew())
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, _, err := fleet.Release(ctx, tx, w.Node, w.Now)
		return err
	})
	require.Equal(t, 1, renew())
}

// A lease that cannot be issued is a finding, and the member's neighbours have theirs.
func TestRenewalGoesOnPastAMemberThatCannotBeRenewed(t *testing.T) {
	w := newWorld(t)
	ids := w.Subjects(ledger.Member, 3)
	w.Occupy(ids[0], "lease:"+ids[0]+":1")
	r := newRenewals(w)
	require.NoError(t, r.Do(t.Context(), w.Now))
	require.EqualValues(t, 2, r.renewed.Load())
	require.Equal(t, finding.Renewal, w.Findings()[0].Kind)
	require.Equal(t, ids[0], w.Findings()[0].ResourceID)
	w.Exec(`DELETE FROM postings WHERE kind = 'occupied'`)
	w.Now = w.Now.Add(time.Minute)
	require.NoError(t, r.Do(t.Context(), w.Now))
	require.Equal(t, 1, w.leases(ids[0]))
	require.Empty(t, w.Findings())
}
