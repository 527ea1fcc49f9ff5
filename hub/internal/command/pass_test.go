package command

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
)

func (w *world) exec(sql string, args ...any) {
	w.t.Helper()
	w.tx(func(ctx context.Context, tx db.Tx) error {
		_, err := tx.Exec(ctx, sql, args...)
		return err
	})
}

func (w *world) count(sql string, args ...any) (n int) {
	w.t.Helper()
	w.tx(func(ctx context.Context, tx db.Tx) error { return tx.QueryRow(ctx, sql, args...).Scan(&n) })
	return n
}

func (w *world) findings() (out []finding.Finding) {
	w.t.Helper()
	w.tx(func(ctx context.Context, tx db.Tx) (err error) {
		out, err = finding.List(ctx, tx)
		return err
	})
	return out
}

// subjects opens as many of a kind, in one org, and returns their ids in order.
func (w *world) subjects(kind string, n int) (ids []string) {
	w.t.Helper()
	w.tx(func(ctx context.Context, tx db.Tx) error {
		ids = nil
		for range n {
			s := ledger.Subject{
				ID: db.NewID(), Kind: kind, OrgID: w.project.OrgID, ProjectID: w.project.ID, NodeID: w.node,
				SKU: "cpu-2", OpenedAt: w.now,
			}
			if err := ledger.OpenSubject(ctx, tx, s); err != nil {
				return err
			}
			ids = append(ids, s.ID)
		}
		return nil
	})
	slices.Sort(ids)
	return ids
}

// occupy takes the key of a posting, so that whoever makes that one fails.
func (w *world) occupy(subject, key string) {
	w.t.Helper()
	w.exec(
		`INSERT INTO postings (id, key, kind, subject_kind, subject_id, org_id, meter, description, correlation_id,
			created_at)
		VALUES ($1, $2, 'occupied', '', $3, $4, '', '', '', $5)`, db.NewID(), key, subject, w.project.OrgID, w.now)
}

// More allocations than one page has are billed in one pass, and the first of them, which cannot be billed, holds up
// none.
func TestAccrualGoesOnPastAnAllocationThatCannotBeBilled(t *testing.T) {
	w := newWorld(t)
	w.tx(func(ctx context.Context, tx db.Tx) error {
		_, err := ledger.CreatePrice(ctx, tx, ledger.Price{
			Meter: ledger.MeterAllocationSeconds, Currency: "EUR",
			Nanos: 1_000_000, Per: "hour", From: w.now,
		}, w.now)
		return err
	})
	ids := w.subjects(ledger.Allocation, passPageRows+1)
	accrue := &Service{DB: w.d, EnqueueNode: func(string) {}, Log: slog.New(slog.DiscardHandler)}
	w.now = w.now.Add(30 * time.Minute)
	w.occupy(ids[0], fmt.Sprintf("allocation:%s:%d", ids[0], w.now.UnixMicro()))
	require.NoError(t, accrue.AccrueAllocations(t.Context(), w.now))
	require.Equal(t, passPageRows,
		w.count(`SELECT count(*) FROM subjects WHERE kind = 'allocation' AND accrued_until = $1`, w.now))
	found := w.findings()
	require.Len(t, found, 1)
	require.Equal(t, finding.Accrual, found[0].Kind)
	require.Equal(t, ids[0], found[0].ResourceID)
	require.Equal(t, w.node, found[0].NodeID)
	require.Equal(t, 1, w.count(`SELECT count(*) FROM events WHERE type = 'hub.recovery.finding' AND subject = $1`,
		ids[0]))

	w.now = w.now.Add(30 * time.Second)
	require.NoError(t, accrue.AccrueAllocations(t.Context(), w.now))
	require.Equal(t, 1, w.count(`SELECT failures FROM subjects WHERE id = $1`, ids[0]),
		"it waits before it is tried again")

	w.exec(`DELETE FROM postings WHERE subject_id = $1 AND kind = 'occupied'`, ids[0])
	w.now = w.now.Add(time.Minute)
	require.NoError(t, accrue.AccrueAllocations(t.Context(), w.now))
	require.Equal(t, passPageRows+1,
		w.count(`SELECT count(*) FROM subjects WHERE kind = 'allocation' AND accrued_until = $1 AND failures = 0`, w.now))
	require.Empty(t, w.findings())
}

// Usage that cannot be written to the journal keeps no other subject's out of it, and is written once it can be.
func TestPostingGoesOnPastASubjectThatCannotBePosted(t *testing.T) {
	w := newWorld(t)
	w.tx(func(ctx context.Context, tx db.Tx) error {
		_, err := ledger.CreatePrice(ctx, tx, ledger.Price{
			Meter: ledger.MeterAllocationSeconds, Currency: "EUR",
			Nanos: 1_000_000, Per: "hour", From: w.now,
		}, w.now)
		return err
	})
	ids := w.subjects(ledger.Allocation, 3)
	w.now = w.now.Add(30 * time.Minute)
	require.NoError(t, (&Service{DB: w.d, EnqueueNode: func(string) {}, Log: slog.New(slog.DiscardHandler)}).
		AccrueAllocations(
			t.Context(), w.now))
	var posting string
	w.tx(func(ctx context.Context, tx db.Tx) error {
		return tx.QueryRow(ctx, `SELECT posting_id FROM pending_postings WHERE subject_id = $1`, ids[0]).Scan(&posting)
	})
	w.occupy(ids[0], "usage:"+posting)
	post := &PostPending{DB: w.d, Interval: time.Hour, Log: slog.New(slog.DiscardHandler)}
	posted := func() int { return w.count(`SELECT count(*) FROM postings WHERE kind = 'usage'`) }

	require.NoError(t, post.Do(t.Context(), w.now.Add(time.Hour)))
	require.Zero(t, posted(), "it has not waited for longer than the interval")
	w.now = w.now.Add(time.Hour + time.Second)
	require.NoError(t, post.Do(t.Context(), w.now))
	require.Equal(t, 2, posted())
	found := w.findings()
	require.Len(t, found, 1)
	require.Equal(t, finding.Posting, found[0].Kind)
	require.Equal(t, ids[0], found[0].ResourceID)

	w.exec(`DELETE FROM postings WHERE subject_id = $1 AND kind = 'occupied'`, ids[0])
	require.NoError(t, post.Do(t.Context(), w.now.Add(time.Hour)))
	require.Equal(t, 2, posted(), "it waits before it is tried again")
	require.NoError(t, post.Do(t.Context(), w.now.Add(time.Hour+time.Second)))
	require.Equal(t, 3, posted())
	require.Equal(t, 1, w.count(`SELECT count(*) FROM postings WHERE id = $1 AND kind = 'usage'`, posting))
	require.Empty(t, w.findings())
	require.NoError(t, post.Do(t.Context(), w.now.Add(9*time.Hour)))
	require.Equal(t, 3, posted(), "once")
}

// A member whose hold cannot go back keeps no other's from going back, neither in the periodic pass nor after its
// node's usage.
func TestSettlementGoesOnPastAMemberThatCannotBeSettled(t *testing.T) {
	w := newWorld(t)
	ids := w.subjects(ledger.Member, 3)
	w.tx(func(ctx context.Context, tx db.Tx) error {
		for _, id := range ids {
			if _, err := ledger.IssueLease(ctx, tx, ledger.LeaseRequest{
				SubjectID: id, NodeID: w.node, Now: w.now,
				Duration: time.Hour,
			}); err != nil {
				return err
			}
			if err := ledger.CloseSubject(ctx, tx, id, w.now, w.now); err != nil {
				return err
			}
		}
		return nil
	})
	var hold string
	w.tx(func(ctx context.Context, tx db.Tx) error {
		return tx.QueryRow(ctx, `SELECT id FROM holds WHERE subject_id = $1`, ids[0]).Scan(&hold)
	})
	w.occupy(ids[0], "hold_closed:"+hold)
	settle := &SettleMembers{DB: w.d, Log: slog.New(slog.DiscardHandler)}
	w.now = w.now.Add(billing.StaleAfter + 2*time.Hour)
	n, err := settle.Do(t.Context(), w.now)
	require.NoError(t, err)
	require.Equal(t, 2, n)
	require.Equal(t, 2, w.count(`SELECT count(*) FROM subjects WHERE settled_at = $1`, w.now))
	require.Equal(t, finding.Settlement, w.findings()[0].Kind)
	require.Equal(t, ids[0], w.findings()[0].ResourceID)

	w.exec(`UPDATE subjects SET final_incarnation = 'i1', final_sequence = 1, retry_at = NULL WHERE id = $1`, ids[0])
	require.NoError(t, settle.Of(t.Context(), []string{w.node}, w.now))
	require.Equal(t, 2, w.count(`SELECT failures FROM subjects WHERE id = $1`, ids[0]))
}

// Where rows fail and cannot even be set aside, the pass ends: the page that begins anew would be the same.
func TestAPassEndsWhenItCanSetNothingAside(t *testing.T) {
	w := newWorld(t)
	for name, c := range map[string]struct {
		asideOf  int
		listings int
	}{
		"none can be set aside": {asideOf: 0, listings: 1},
		"one can":               {asideOf: 1, listings: 2},
	} {
		t.Run(name, func(t *testing.T) {
			listings, asides := 0, 0
			_, err := pass[string]{
				db: w.d, log: slog.New(slog.DiscardHandler), now: w.now, pageRows: 2, anew: true,
				list: func(_ context.Context, _ db.Tx, after *string) ([]string, error) {
					require.Nil(t, after)
					listings++
					if listings > 10 {
						return nil, errors.New("it lists the same page again and again")
					}
					return []string{"a", "b"}, nil
				},
				org:     func(string) string { return "org" },
				process: func(context.Context, db.Tx, string) error { return errInjected },
				aside: func(context.Context, db.Tx, string) (finding.Finding, error) {
					if asides++; asides > c.asideOf {
						return finding.Finding{}, errInjected
					}
					return finding.Finding{NodeID: w.node, Kind: finding.Renewal, ResourceID: db.NewID()}, nil
				},
			}.run(t.Context())
			require.NoError(t, err)
			require.Equal(t, c.listings, listings)
		})
	}
}
