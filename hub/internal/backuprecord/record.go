// Package backuprecord owns the rows that say which backups were read back and found whole. It knows nothing of the
// files (hub/internal/backup).
package backuprecord

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// Record is a backup that was read back and found whole.
type Record struct {
	ID        string
	TakenAt   time.Time
	SizeBytes int64
	At        time.Time
}

// Plan records a backup before it reads the rows. From the first planned backup on, nodes delete usage only when a
// verified backup holds it: the first one does not hold what is posted while it is being made.
func Plan(ctx context.Context, tx db.Tx, id string, now time.Time) error {
	_, err := tx.Exec(ctx, `INSERT INTO backups (id, taken_at, size_bytes) VALUES ($1, $2, 0)`, id, now)
	return err
}

// Verified records that the backup was read back and is whole.
func Verified(ctx context.Context, tx db.Tx, b Record) error {
	_, err := tx.Exec(ctx, `UPDATE backups SET taken_at = $2, size_bytes = $3, verified_at = $4 WHERE id = $1`, b.ID,
		b.TakenAt, b.SizeBytes, b.At)
	return err
}

// Last gives the newest verified backup; ok is false where there is none.
func Last(ctx context.Context, tx db.Tx) (b Record, ok bool, err error) {
	b, err = db.SelectOne(ctx, tx, pgx.RowToStructByPos[Record],
		`SELECT id, taken_at, size_bytes, verified_at FROM backups WHERE verified_at IS NOT NULL
			ORDER BY taken_at DESC, id DESC LIMIT 1`)
	if db.IsNoRows(err) {
		return Record{}, false, nil
	}
	return b, err == nil, err
}

// DeleteOldRecords deletes a batch of the records of old backups, but for the newest verified one.
func DeleteOldRecords(ctx context.Context, tx db.Tx, o db.Old[string]) (last string, n int, err error) {
	return db.DeleteOld(ctx, tx, o,
		`SELECT id FROM backups WHERE id >= $1 AND id < $2 AND taken_at < $3 AND id IS DISTINCT FROM
			(SELECT b.id FROM backups b WHERE b.verified_at IS NOT NULL ORDER BY b.id DESC LIMIT 1) ORDER BY id LIMIT $4`,
		`DELETE FROM backups WHERE id = ANY($1::UUID[])`)
}
