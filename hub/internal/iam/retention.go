package iam

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// DeleteOldTokens deletes a batch of user tokens that expired or were revoked before a moment.
func DeleteOldTokens(ctx context.Context, tx db.Tx, o db.Old[string]) (last string, n int, err error) {
	return db.DeleteOld(ctx, tx, o,
		`SELECT id FROM user_tokens WHERE id >= $1 AND id < $2 AND (expires_at < $3 OR revoked_at < $3) ORDER BY id LIMIT $4`,
		`DELETE FROM user_tokens WHERE id = ANY($1::UUID[])`)
}
