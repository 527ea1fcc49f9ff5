package periodic_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/periodic"
)

// More allocations than one page has are billed in one pass, and the first of them, which cannot be billed, holds up
// none.
func TestAccrualGoesOnPastAnAllocationThatCannotBeBilled(t *testing.T) {
	w := newWorld(t)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, err := ledger.CreatePrice(ctx, tx, ledger.Price{
			Meter: ledger.MeterAllocationSeconds, Currency: "EUR",
			Nanos: 1_000_000, Per: "hour", From: w.Now,
		}, w.Now)
		return err
	})
	ids := w.Subjects(ledger.Allocation, periodic.PassPageRows+1)
	w.Now = w.Now.Add(30 * time.Minute)
	w.Occupy(ids[0], fmt.Sprintf("allocation:%s:%d", ids[0],
		w.Count(`SELECT placed_nanos FROM holds WHERE subject_id = $1`, ids[0])))
	require.NoError(t, w.passes().AccrueAllocations(t.Context(), time.Time{}, w.Now))
	require.Equal(t, periodic.PassPageRows,
		w.Count(`SELECT count(*) FROM subjects WHERE kind = 'allocation' AND accrued_until = $1`, w.Now))
	found := w.Findings()
	require.Len(t, found, 1)
	require.Equal(t, finding.Accrual, found[0].Kind)
	require.Equal(t, ids[0], found[0].ResourceID)
	require.Equal(t, w.Node, found[0].NodeID)
	require.Equal(t, 1, w.Count(`SELECT count(*) FROM events WHERE type = 'hub.recovery.finding' AND subject = $1`,
		ids[0]))

	w.Now = w.Now.Add(30 * time.Second)
	require.NoError(t, w.passes().AccrueAllocations(t.Context(), time.Time{}, w.Now))
	require.Equal(t, 1, w.Count(`SELECT failures FROM subjects WHERE id = $1`, ids[0]),
		"it waits before it is tried again")

	w.Exec(`DELETE FROM postings WHERE subject_id = $1 AND kind = 'occupied'`, ids[0])
	w.Now = w.Now.Add(time.Minute)
	require.NoError(t, w.passes().AccrueAllocations(t.Context(), time.Time{}, w.Now))
	require.Equal(t, periodic.PassPageRows+1,
		w.Count(`SELECT count(*) FROM subjects WHERE kind = 'allocation' AND accrued_until = $1 AND failures = 0`, w.Now))
	require.Empty(t, w.Findings())
}

// Usage that cannot be written to the journal keeps no other subject's out of it, and is written once it can be.
func TestPostingGoesOnPastASubjectThatCannotBePosted(t *testing.T) {
	w := newWorld(t)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, err := ledger.CreatePrice(ctx, tx, ledger.Price{
			Meter: ledger.MeterAllocationSeconds, Currency: "EUR",
			Nanos: 1_000_000, Per: "hour", From: w.Now,
		}, w.Now)
		return err
	})
	ids := w.Subjects(ledger.Allocation, 3)
	w.Now = w.Now.Add(30 * time.Minute)
	require.NoError(t, w.passes().AccrueAllocations(t.Context(), time.Time{}, w.Now))
	var posting string
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		return tx.QueryRow(ctx, `SELECT posting_id FROM pending_postings WHERE subject_id = $1`, ids[0]).Scan(&posting)
	})
	w.Occupy(ids[0], "usage:"+posting)
	post := func(now time.Time) error { return w.passes().PostPending(t.Context(), time.Hour, now) }
	posted := func() int { return w.Count(`SELECT count(*) FROM postings WHERE kind = 'usage'`) }

	require.NoError(t, post(w.Now.Add(time.Hour)))
	require.Zero(t, posted(), "it has not waited for longer than the interval")
	w.Now = w.Now.Add(time.Hour + time.Second)
	require.NoError(t, post(w.Now))
	require.Equal(t, 2, posted())
	found := w.Findings()
	require.Len(t, found, 1)
	require.Equal(t, finding.Posting, found[0].Kind)
	require.Equal(t, ids[0], found[0].ResourceID)

	w.Exec(`DELETE FROM postings WHERE subject_id = $1 AND kind = 'occupied'`, ids[0])
	require.NoError(t, post(w.Now.Add(time.Hour)))
	require.Equal(t, 2, posted(), "it waits before it is tried again")
	require.NoError(t, post(w.Now.Add(time.Hour+time.Second)))
	require.Equal(t, 3, posted())
	require.Equal(t, 1, w.Count(`SELECT count(*) FROM postings WHERE id = $1 AND kind = 'usage'`, posting))
	require.Empty(t, w.Findings())
	require.NoError(t, post(w.Now.Add(9*time.Hour)))
	require.Equal(t, 3, posted(), "once")
}

// A member whose hold cannot go back keeps no other's from going back, neither in the periodic pass nor after its
// node's usage.
func TestSettlementGoesOnPastAMemberThatCannotBeSettled(t *testing.T) {
	w := newWorld(t)
	ids := w.Subjects(ledger.Member, 3)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		for _, id := range ids {
			if _, err := ledger.IssueLease(ctx, tx, ledger.LeaseRequest{
				SubjectID: id, NodeID: w.Node, Now: w.Now,
				Duration: time.Hour,
			}); err != nil {
				return err
			}
			if err := ledger.CloseSubject(ctx, tx, id, w.Now, w.Now); err != nil {
				return err
			}
		}
		return nil
	})
	var hold string
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		return tx.QueryRow(ctx, `SELECT id FROM holds WHERE subject_id = $1`, ids[0]).Scan(&hold)
	})
	w.Occupy(ids[0], "hold_closed:"+hold)
	w.Now = w.Now.Add(billing.StaleAfter + 2*time.Hour)
	n, err := w.passes().SettleMembers(t.Context(), w.Now)
	require.NoError(t, err)
	require.Equal(t, 2, n)
	require.Equal(t, 2, w.Count(`SELECT count(*) FROM subjects WHERE settled_at = $1`, w.Now))
	require.Equal(t, finding.Settlement, w.Findings()[0].Kind)
	require.Equal(t, ids[0], w.Findings()[0].ResourceID)

	w.Exec(`UPDATE subjects SET final_incarnation = 'i1', final_sequence = 1, retry_at = NULL WHERE id = $1`, ids[0])
	require.NoError(t, w.passes().SettleMembersOf(t.Context(), []string{w.Node}, w.Now))
	require.Equal(t, 2, w.Count(`SELECT failures FROM subjects WHERE id = $1`, ids[0]))
}
