package recovery

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// DeleteOldSetAside deletes usage segments that were set aside before a moment, with their findings: by then their
// usage cannot be disputed any more. It returns how many they were, and when the last of them was set aside.
func DeleteOldSetAside(ctx context.Context, tx db.Tx, o db.Old[time.Time]) (last time.Time, n int, err error) {
	rows, err := tx.Query(ctx, `SELECT node_id, incarnation, number, set_aside_at FROM usage_set_aside
		WHERE set_aside_at >= $1 AND set_aside_at < $2 ORDER BY set_aside_at LIMIT $3`, o.After, o.Before, o.Limit)
	if err != nil {
		return last, 0, err
	}
	var (
		nodes        []pgtype.UUID
		incarnations []string
		numbers      []int64
		node         pgtype.UUID
		incarnation  string
		number       int64
	)
	if _, err := pgx.ForEachRow(rows, []any{&node, &incarnation, &number, &last}, func() error {
		nodes, incarnations, numbers = append(nodes, node), append(incarnations, incarnation), append(numbers, number)
		return nil
	}); err != nil || len(nodes) == 0 {
		return last, 0, err
	}
	for _, statement := range []string{
		`DELETE FROM recovery_findings WHERE (node_id, kind, resource_id) IN (SELECT x.node, 'usage_set_aside', x.store || '/'
			|| x.no::TEXT
			FROM unnest($1::UUID[], $2::TEXT[], $3::INT8[]) AS x(node, store, no))`,
		`DELETE FROM usage_set_aside WHERE (node_id, incarnation, number) IN (SELECT x.node, x.store, x.no
			FROM unnest($1::UUID[], $2::TEXT[], $3::INT8[]) AS x(node, store, no))`,
	} {
		if err := tx.Later(ctx, statement, nodes, incarnations, numbers); err != nil {
			return last, 0, err
		}
	}
	return last, len(nodes), nil
}

// DeleteOldBackups deletes a batch of the records of old backups, but for the newest verified one.
func DeleteOldBackups(ctx context.Context, tx db.Tx, o db.Old[string]) (last string, n int, err error) {
	return db.DeleteOld(ctx, tx, o,
		`SELECT id FROM backups WHERE id >= $1 AND id < $2 AND taken_at < $3 AND id IS DISTINCT FROM
			(SELECT b.id FROM backups b WHERE b.verified_at IS NOT NULL ORDER BY b.id DESC LIMIT 1) ORDER BY id LIMIT $4`,
		`DELETE FROM backups WHERE id = ANY($1::UUID[])`)
}
