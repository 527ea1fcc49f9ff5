package instance

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// DeleteHistory deletes operations and revisions of instances that were decommissioned before a moment: all but the last of each, which
// the instance's read model shows. It returns how many instances these were, and when the last of them was decommissioned.
func DeleteHistory(ctx context.Context, tx db.Tx, o db.Old[time.Time]) (last time.Time, n int, err error) {
	rows, err := tx.Query(ctx, `SELECT id, updated_at FROM app_instances
		WHERE status = 'decommissioned' AND NOT history_deleted AND updated_at >= $1 AND updated_at < $2 ORDER BY updated_at LIMIT $3`,
		o.After, o.Before, o.Limit)
	if err != nil {
		return last, 0, err
	}
	var (
		ids []pgtype.UUID
		id  pgtype.UUID
	)
	if _, err := pgx.ForEachRow(rows, []any{&id, &last}, func() error {
		ids = append(ids, id)
		return nil
	}); err != nil || len(ids) == 0 {
		return last, 0, err
	}
	for _, statement := range []string{
		`DELETE FROM instance_operations WHERE instance_id = ANY($1::UUID[]) AND EXISTS (SELECT 1 FROM instance_operations l
			WHERE l.instance_id = instance_operations.instance_id AND l.id > instance_operations.id)`,
		`DELETE FROM member_revisions WHERE member_id IN (SELECT m.id FROM instance_members m WHERE m.instance_id = ANY($1::UUID[]))`,
		`DELETE FROM instance_revisions WHERE instance_id = ANY($1::UUID[])
			AND revision <> (SELECT i.revision FROM app_instances i WHERE i.id = instance_revisions.instance_id)`,
		`UPDATE instance_revisions SET manifest_envelope = '', delegation_envelope = '' WHERE instance_id = ANY($1::UUID[])`,
		`UPDATE app_instances SET history_deleted = true WHERE id = ANY($1::UUID[])`,
	} {
		if err := tx.Later(ctx, statement, ids); err != nil {
			return last, 0, err
		}
	}
	return last, len(ids), nil
}
