package event

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// DeleteOldEvents deletes a batch of old events. One that has no position yet stays.
func DeleteOldEvents(ctx context.Context, tx db.Tx, o db.Old[string]) (last string, n int, err error) {
	return db.DeleteOld(ctx, tx, o,
		`SELECT id FROM events WHERE id >= $1 AND id < $2 AND at < $3 AND pos IS NOT NULL ORDER BY id LIMIT $4`,
		`DELETE FROM events WHERE id = ANY($1::UUID[])`)
}

// DeleteOldAudit deletes a batch of old rows of the audit trail.
func DeleteOldAudit(ctx context.Context, tx db.Tx, o db.Old[string]) (last string, n int, err error) {
	return db.DeleteOld(ctx, tx, o,
		`SELECT id FROM audit_rows WHERE id >= $1 AND id < $2 AND at < $3 ORDER BY id LIMIT $4`,
		`DELETE FROM audit_rows WHERE id = ANY($1::UUID[])`)
}
