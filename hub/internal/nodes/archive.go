package nodes

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// PostedUsage is how far the usage of one store of a node is posted.
type PostedUsage struct {
	NodeID      string
	Incarnation string
	Number      uint64
}

// SelectPosted returns how far the usage of each store is posted, for a backup.
func SelectPosted(ctx context.Context, tx db.Tx) ([]PostedUsage, error) {
	rows, err := tx.Query(ctx,
		`SELECT node_id, incarnation, number FROM usage_watermarks WHERE number > 0 ORDER BY node_id, incarnation`)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[PostedUsage])
}

// RecordArchived records that this usage is in a verified backup: nodes may delete it.
func RecordArchived(ctx context.Context, tx db.Tx, posted []PostedUsage) error {
	var (
		nodes, incarnations []string
		numbers             []int64
	)
	for _, m := range posted {
		nodes, incarnations, numbers = append(nodes, m.NodeID), append(incarnations, m.Incarnation),
			append(numbers, int64(m.Number))
	}
	_, err := tx.Exec(ctx,
		`UPDATE usage_watermarks SET archived = x.number FROM unnest($1::text[], $2::text[], $3::int8[]) AS x(node,
			incarnation,
			number)
		WHERE usage_watermarks.node_id = x.node::uuid AND usage_watermarks.incarnation = x.incarnation
		AND usage_watermarks.archived < x.number`, nodes, incarnations, numbers)
	return err
}
