package instance

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
)

// DeleteHistory deletes operations and revisions of instances that were decommissioned before a time, except the last
// of each, which the API shows. It returns how many instances these were, and when the last of them was decommissioned.
func DeleteHistory(ctx context.Context, tx db.Tx, o db.Old[time.Time]) (last time.Time, n int, err error) {
	ids, last, err := selectOld(ctx, tx, o, `SELECT id, decommissioned_at FROM app_instances
		WHERE NOT history_deleted AND decommissioned_at >= $1 AND decommissioned_at < $2 ORDER BY decommissioned_at
		LIMIT $3`)
	if err != nil || len(ids) == 0 {
		return last, 0, err
	}
	for _, statement := range []string{
		`DELETE FROM instance_operations WHERE instance_id = ANY($1::UUID[]) AND EXISTS (SELECT 1 FROM instance_operations l
			WHERE l.instance_id = instance_operations.instance_id AND l.id > instance_operations.id)`,
		`DELETE FROM instance_tasks WHERE instance_id = ANY($1::UUID[])`,
		`DELETE FROM member_revisions WHERE member_id IN (SELECT m.id FROM instance_members m
			WHERE m.instance_id = ANY($1::UUID[]))`,
		`DELETE FROM instance_revisions WHERE instance_id = ANY($1::UUID[])
			AND revision <> (SELECT i.revision FROM app_instances i WHERE i.id = instance_revisions.instance_id)`,
		`UPDATE instance_revisions SET manifest_envelope = '', delegation_envelope = '' WHERE instance_id = ANY($1::UUID[])`,
		`UPDATE app_instances SET history_deleted = true WHERE id = ANY($1::UUID[])`,
	} {
		if err := tx.Queue(ctx, statement, ids); err != nil {
			return last, 0, err
		}
	}
	return last, len(ids), nil
}

// selectOld returns the ids of a query over ids and times, with the last time.
func selectOld(ctx context.Context, tx db.Tx, o db.Old[time.Time], query string,
) (ids []pgtype.UUID, last time.Time, err error) {
	var id pgtype.UUID
	err = db.ForEach(ctx, tx, []any{&id, &last}, func() { ids = append(ids, id) }, query, o.After, o.Before, o.Limit)
	return ids, last, err
}

// supersede records since when each revision of an instance is no longer needed (keptRevisions).
func supersede(ctx context.Context, tx db.Tx, instanceID string, desired int64, now time.Time) error {
	revisions, err := selectRevisions(ctx, tx, instanceID)
	if err != nil {
		return err
	}
	return tx.Queue(ctx,
		`UPDATE instance_revisions SET superseded_at = CASE WHEN superseded_at IS NULL THEN $3::TIMESTAMPTZ END
		WHERE instance_id = $1 AND (superseded_at IS NULL) <> (revision = ANY($2::INT8[]))`,
		instanceID, keptRevisions(revisions, desired), now)
}

// keptRevisions are the revisions that are kept whatever their age: the desired one, the newest (its number must not be
// used again), the fallback of an upgrade, the target of a rollback, and the target of the rollback after that.
func keptRevisions(revisions lifecycle.Revisions, desired int64) []int64 {
	now := revisions.Find(desired)
	previous := revisions.Find(now.Previous)
	return []int64{desired, revisions.Newest().No, now.Fallback, previous.No, previous.Previous}
}

// DeleteOldRevisions deletes revisions that were superseded before a time. It returns how many they were, and when the
// last of them was superseded.
func DeleteOldRevisions(ctx context.Context, tx db.Tx, o db.Old[time.Time]) (last time.Time, n int, err error) {
	var (
		ids     []pgtype.UUID
		numbers []int64
		id      pgtype.UUID
		number  int64
	)
	err = db.ForEach(ctx, tx, []any{&id, &number, &last}, func() {
		ids, numbers = append(ids, id), append(numbers, number)
	}, `SELECT instance_id, revision, superseded_at FROM instance_revisions
		WHERE superseded_at >= $1 AND superseded_at < $2 ORDER BY superseded_at LIMIT $3`, o.After, o.Before, o.Limit)
	if err != nil || len(ids) == 0 {
		return last, 0, err
	}
	for _, statement := range []string{
		`DELETE FROM member_revisions WHERE (member_id, revision) IN (SELECT m.id, x.no
			FROM unnest($1::UUID[], $2::INT8[]) AS x(id, no) JOIN instance_members m ON m.instance_id = x.id)`,
		`DELETE FROM instance_revisions WHERE (instance_id, revision) IN (SELECT x.id, x.no
			FROM unnest($1::UUID[], $2::INT8[]) AS x(id, no))`,
	} {
		if err := tx.Queue(ctx, statement, ids, numbers); err != nil {
			return last, 0, err
		}
	}
	return last, len(ids), nil
}

// DeleteOldOperations deletes operations that were superseded before a time.
func DeleteOldOperations(ctx context.Context, tx db.Tx, o db.Old[time.Time]) (last time.Time, n int, err error) {
	ids, last, err := selectOld(ctx, tx, o, `SELECT id, superseded_at FROM instance_operations
		WHERE superseded_at >= $1 AND superseded_at < $2 ORDER BY superseded_at LIMIT $3`)
	if err != nil || len(ids) == 0 {
		return last, 0, err
	}
	return last, len(ids), tx.Queue(ctx, `DELETE FROM instance_operations WHERE id = ANY($1::UUID[])`, ids)
}
