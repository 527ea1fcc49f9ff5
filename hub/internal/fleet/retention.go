package fleet

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// DeleteOldTokens deletes a batch of join tokens, used or not, that expired before a moment.
func DeleteOldTokens(ctx context.Context, tx db.Tx, o db.Old[string]) (last string, n int, err error) {
	return db.DeleteOld(ctx, tx, o,
		`SELECT id FROM join_tokens WHERE id >= $1 AND id < $2 AND expires_at < $3 ORDER BY id LIMIT $4`,
		`DELETE FROM join_tokens WHERE id = ANY($1::UUID[])`)
}
