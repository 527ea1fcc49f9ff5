package event

import (
	"cmp"
	"context"

	"github.com/google/uuid"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// DeleteOldEvents deletes a batch of old events. One that has no position yet stays.
func DeleteOldEvents(ctx context.Context, tx db.Tx, o db.Old[string]) (last string, n int, err error) {
	return db.DeleteOld(ctx, tx, o,
		`SELECT id FROM events WHERE id >= $1 AND id < $2 AND at < $3 AND pos IS NOT NULL ORDER BY id LIMIT $4`,
		`DELETE FROM events WHERE id = ANY($1::UUID[])`)
}

// DeleteOldAudit deletes a batch of old rows of the audit trail: of each chain its first ones, so that the others still
// follow each other. An old row stays while one before it in its chain is not old, and while it has no number.
func DeleteOldAudit(ctx context.Context, tx db.Tx, o db.Old[string]) (last string, n int, err error) {
	young := db.FirstID(o.Before)
	upTo := map[string]int64{}
	var (
		chain  string
		number int64
	)
	err = db.ForEach(ctx, tx, []any{&last, &chain, &number}, func() {
		upTo[chain] = max(upTo[chain], number)
		n++
	}, `
		SELECT id, chain, number FROM audit_rows
		WHERE id > $1 AND id < $2 AND at < $3 AND number IS NOT NULL ORDER BY id LIMIT $4`,
		cmp.Or(o.After, uuid.Nil.String()), young, o.Before, o.Limit)
	if err != nil {
		return "", 0, err
	}
	for chain, number := range upTo {
		if err := tx.Queue(ctx, `
			DELETE FROM audit_rows WHERE chain = $1 AND number <= $2 AND number < COALESCE((
			  SELECT min(number) FROM audit_rows
			  WHERE chain = $1 AND number <= $2 AND (id >= $3 OR at >= $4)), $2::INT8 + 1)`, chain, number, young,
			o.Before); err != nil {
			return "", 0, err
		}
	}
	return last, n, nil
}
