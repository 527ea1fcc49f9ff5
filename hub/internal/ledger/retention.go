package ledger

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/protocol"
)

// DeleteOldSuspense deletes a batch of old suspense records. Their sums, and the segments that hold them, stay.
func DeleteOldSuspense(ctx context.Context, tx db.Tx, o db.Old[string]) (last string, n int, err error) {
	return db.DeleteOld(ctx, tx, o,
		`SELECT id FROM suspense_records WHERE id >= $1 AND id < $2 AND created_at < $3 ORDER BY id LIMIT $4`,
		`DELETE FROM suspense_records WHERE id = ANY($1::UUID[])`)
}

// DeleteOldLeases deletes a batch of leases that ended before a moment, and returns when the last of them did. All
// leases of a member go that was settled before it. One that is not settled keeps the latest two, and each until its
// node has reported usage beyond it: that usage is rated by it. Once a lease may be deleted it stays so.
func DeleteOldLeases(ctx context.Context, tx db.Tx, o db.Old[time.Time]) (last time.Time, n int, err error) {
	var (
		nodes, subjects []pgtype.UUID
		numbers         []int64
		node, subject   pgtype.UUID
		number          int64
	)
	err = db.ForEach(ctx, tx, []any{&node, &subject, &number, &last}, func() {
		nodes, subjects, numbers = append(nodes, node), append(subjects, subject), append(numbers, number)
	},
		`SELECT l.node_id, l.subject_id, l.lease_no, l.expires_at FROM leases l JOIN subjects s ON s.id = l.subject_id
		WHERE l.expires_at >= $1 AND l.expires_at < $2 AND (s.settled_at < $2 OR s.settled_at IS NULL
		AND l.lease_no < s.lease_no - 1
			AND l.expires_at <= (SELECT max(u.to_at) FROM usage_coverage u
				WHERE u.node_id = s.node_id AND u.subject_id = s.id AND u.meter = $4))
		ORDER BY l.expires_at LIMIT $3`, o.After, o.Before, o.Limit, protocol.MeterSessionSeconds)
	if err != nil || len(subjects) == 0 {
		return last, 0, err
	}
	return last, len(subjects), tx.Queue(ctx, `DELETE FROM leases WHERE (node_id, subject_id, lease_no) IN (
		SELECT x.node, x.id, x.no FROM unnest($1::uuid[], $2::uuid[], $3::int8[]) AS x(node, id, no))`,
		nodes, subjects, numbers)
}
