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

// DeleteOldSessions deletes a batch of sessions that expired or were revoked before a moment, with no token left.
func DeleteOldSessions(ctx context.Context, tx db.Tx, o db.Old[string]) (last string, n int, err error) {
	return db.DeleteOld(ctx, tx, o,
		`SELECT id FROM sessions WHERE id >= $1 AND id < $2 AND (expires_at < $3 OR revoked_at < $3)
			AND NOT EXISTS (SELECT 1 FROM user_tokens t WHERE t.session_id = sessions.id) ORDER BY id LIMIT $4`,
		`DELETE FROM sessions WHERE id = ANY($1::UUID[])`)
}

// DeleteOldInvitations deletes a batch of invitations, accepted or not, that expired before a moment.
func DeleteOldInvitations(ctx context.Context, tx db.Tx, o db.Old[string]) (last string, n int, err error) {
	return db.DeleteOld(ctx, tx, o,
		`SELECT id FROM invitations WHERE id >= $1 AND id < $2 AND expires_at < $3 ORDER BY id LIMIT $4`,
		`DELETE FROM invitations WHERE id = ANY($1::UUID[])`)
}
