package capacity

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// insertVolume relies on the unique index on the names of a project's volumes.
func insertVolume(ctx context.Context, tx db.Tx, v Volume) error {
	tag, err := tx.Exec(ctx,
		`INSERT INTO volumes (id, org_id, project_id, node_id, name, size_bytes, status, requested_by_type,
			requested_by_id, correlation_id, resource_version, created_at, updated_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13) ON CONFLICT DO NOTHING`,
		v.ID, v.OrgID, v.ProjectID, v.NodeID, v.Name, v.SizeBytes, string(v.Status), v.RequestedBy.Type, v.RequestedBy.ID,
		v.CorrelationID, v.ResourceVersion, v.CreatedAt, v.UpdatedAt)
	if err == nil && tag.RowsAffected() == 0 {
		return fault.New(fault.Conflict, codeVolumeExists, "The project has a volume of this name.", nil).
			WithField("/name", "is taken")
	}
	return err
}

func updateVolume(ctx context.Context, tx db.Tx, v Volume) error {
	return tx.Queue(ctx,
		`UPDATE volumes SET status = $2, status_reason = $3, detail = $4, restore_no = $5, restore_snapshot_id = $6,
			resource_version = $7, updated_at = $8, ready_at = $9, deleted_at = $10, size_bytes = $11,
			made_bytes = $12 WHERE id = $1`,
		v.ID, string(v.Status), v.StatusReason, v.Detail, v.RestoreNo, v.RestoreSnapshotID, v.ResourceVersion, v.UpdatedAt,
		db.OrNull(v.ReadyAt), db.OrNull(v.DeletedAt), v.SizeBytes, v.MadeBytes)
}

func selectVolumes(ctx context.Context, tx db.Tx, where string, args ...any) ([]Volume, error) {
	return db.Select(ctx, tx, scanVolume,
		`SELECT v.id, v.org_id, v.project_id, v.node_id, v.name, v.size_bytes, v.made_bytes, v.status, v.status_reason,
			v.detail, v.restore_no, v.restore_snapshot_id, v.requested_by_type, v.requested_by_id, v.correlation_id,
			v.resource_version, v.created_at, v.updated_at, v.ready_at, v.deleted_at,
			ARRAY(SELECT u.member_id::TEXT FROM reserved_volumes u WHERE u.volume_id = v.id ORDER BY u.member_id)
		FROM volumes v `+where, args...)
}

func scanVolume(row pgx.CollectableRow) (v Volume, err error) {
	err = row.Scan(&v.ID, &v.OrgID, &v.ProjectID, &v.NodeID, &v.Name, &v.SizeBytes, &v.MadeBytes, &v.Status,
		&v.StatusReason, &v.Detail, &v.RestoreNo, &v.RestoreSnapshotID, &v.RequestedBy.Type, &v.RequestedBy.ID,
		&v.CorrelationID, &v.ResourceVersion, &v.CreatedAt, &v.UpdatedAt, (*zeronull.Timestamptz)(&v.ReadyAt),
		(*zeronull.Timestamptz)(&v.DeletedAt), &v.UsedBy)
	return v, err
}

// volumeBytes sums up the volumes v for which the condition holds, with their snapshots; size is the column that counts
// for a volume.
func volumeBytes(ctx context.Context, tx db.Tx, size, condition string, arg any) (int64, error) {
	return db.Value[int64](ctx, tx, `SELECT coalesce(sum(`+size+` + coalesce((SELECT sum(s.size_bytes)
			FROM volume_snapshots s WHERE s.volume_id = v.id AND s.deleted_at IS NULL), 0)), 0)::INT8
		FROM volumes v WHERE v.deleted_at IS NULL AND `+condition, arg)
}

func insertSnapshot(ctx context.Context, tx db.Tx, s Snapshot) error {
	return tx.Queue(ctx,
		`INSERT INTO volume_snapshots (id, volume_id, description, size_bytes, status, correlation_id, resource_version,
			created_at, updated_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)`,
		s.ID, s.VolumeID, s.Description, s.SizeBytes, string(s.Status), s.CorrelationID, s.ResourceVersion, s.CreatedAt,
		s.UpdatedAt)
}

func updateSnapshot(ctx context.Context, tx db.Tx, s Snapshot) error {
	return tx.Queue(ctx,
		`UPDATE volume_snapshots SET status = $2, resource_version = $3, updated_at = $4, deleted_at = $5 WHERE id = $1`,
		s.ID, string(s.Status), s.ResourceVersion, s.UpdatedAt, db.OrNull(s.DeletedAt))
}

// endSnapshots ends the snapshots of a volume that is gone.
func endSnapshots(ctx context.Context, tx db.Tx, volumeID string, now time.Time) error {
	return tx.Queue(ctx,
		`UPDATE volume_snapshots SET status = 'deleted', resource_version = resource_version + 1, updated_at = $2,
			deleted_at = $2 WHERE volume_id = $1 AND deleted_at IS NULL`, volumeID, now)
}

func selectSnapshots(ctx context.Context, tx db.Tx, where string, args ...any) ([]Snapshot, error) {
	return db.Select(ctx, tx, scanSnapshot, `SELECT id, volume_id, description, size_bytes, status, correlation_id,
			resource_version, created_at, updated_at, deleted_at FROM volume_snapshots `+where, args...)
}

func scanSnapshot(row pgx.CollectableRow) (s Snapshot, err error) {
	err = row.Scan(&s.ID, &s.VolumeID, &s.Description, &s.SizeBytes, &s.Status, &s.CorrelationID, &s.ResourceVersion,
		&s.CreatedAt, &s.UpdatedAt, (*zeronull.Timestamptz)(&s.DeletedAt))
	return s, err
}
