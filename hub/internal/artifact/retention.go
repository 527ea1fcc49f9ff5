package artifact

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// DeleteOldIntents deletes a batch of publish intents that ended before a moment, not the artifacts registered under
// them.
func DeleteOldIntents(ctx context.Context, tx db.Tx, o db.Old[string]) (last string, n int, err error) {
	return db.DeleteOld(ctx, tx, o,
		`SELECT id FROM publish_intents WHERE id >= $1 AND id < $2 AND expires_at < $3 ORDER BY id LIMIT $4`,
		`DELETE FROM publish_intents WHERE id = ANY($1::UUID[])`)
}
