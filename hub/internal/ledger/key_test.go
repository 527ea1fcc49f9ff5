package ledger_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/protocol"
)

// Two transactions that post the usage of different nodes must not meet on a page of an index: the keys of what posting
// reads or changes begin with the node or the org. PostgreSQL itself counts which tables those are.
func TestKeysOfUsagePostingBeginWithNodeOrOrg(t *testing.T) {
	w := newWorld(t)
	w.credit("1000")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "3.6")
	s := w.member()
	w.lease(s, billing.MaxLease)
	w.now = at(60)
	require.True(t, w.post(w.session(s, 0, 30)))
	// More than its time: a part of it is in suspense.
	read, err := segmentOf(s.NodeID, incarnation, 2, record(2, s, protocol.MeterSessionSeconds, 30, 60, 40_000_000))
	require.NoError(t, err)
	must(w, func(ctx context.Context, tx db.Tx) (int, error) {
		before, err := touched(ctx, tx)
		require.NoError(t, err)
		_, err = ledger.PostUsage(ctx, tx, w.now, read)
		require.NoError(t, err)
		after, err := touched(ctx, tx)
		require.NoError(t, err)
		names := map[string]bool{}
		for name, table := range after {
			if table.count == before[name].count {
				continue
			}
			names[name] = true
			switch name {
			case "subjects": // found by the member that a record names, and changed in place
			case "usage_slots": // eight rows, of which one changes every four hours
			case "backups": // whether there is any
			default:
				require.Contains(t, []string{"node_id", "org_id"}, table.firstColumn, name)
			}
		}
		for _, name := range []string{
			"usage_watermarks", "usage_coverage", "usage_hours", "pending_postings", "holds", "leases", "suspense_totals",
			"suspense_records",
		} {
			require.True(t, names[name], "%s is read or changed", name)
		}
		return 0, nil
	})
}

// tableUse is how often this connection has read or changed a table, and what its primary key begins with. Rows that
// are only added do not count: nothing conflicts with an INSERT but a reader.
type tableUse struct {
	firstColumn string
	count       int64
}

func touched(ctx context.Context, tx db.Tx) (map[string]tableUse, error) {
	// Statements that are still to be sent count, too.
	if _, err := tx.Exec(ctx, `SELECT 1`); err != nil {
		return nil, err
	}
	rows, err := tx.Query(ctx, `SELECT t.relname, a.attname,
			t.seq_scan + coalesce(t.idx_scan, 0) + t.n_tup_upd + t.n_tup_del
		FROM pg_stat_xact_user_tables t JOIN pg_index i ON i.indrelid = t.relid AND i.indisprimary
		JOIN pg_attribute a ON a.attrelid = t.relid AND a.attnum = i.indkey[0]`)
	if err != nil {
		return nil, err
	}
	out := map[string]tableUse{}
	var name string
	var use tableUse
	_, err = pgx.ForEachRow(rows, []any{&name, &use.firstColumn, &use.count}, func() error {
		out[name] = use
		return nil
	})
	return out, err
}
