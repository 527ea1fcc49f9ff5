package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// tokenRevokedVersion follows version 1, the token as it was made: a token changes once.
const tokenRevokedVersion = 2

// RevokeUserToken ends one token: of one's own, or of a user of an org that the caller administers. Revoking twice is
// NotFound.
func (s *Service) RevokeUserToken(ctx context.Context, m Meta, userID, tokenID string) error {
	_, err := db.RunTx(ctx, s.DB, func(tx db.Tx) (struct{}, error) {
		return struct{}{}, s.revokeUserToken(ctx, tx, m, userID, tokenID)
	})
	return err
}

func (s *Service) revokeUserToken(ctx context.Context, tx db.Tx, m Meta, userID, tokenID string) error {
	user, err := iam.OfUserOrSelf(ctx, tx, m.Principal, iam.UserManage, userID)
	if err != nil {
		return err
	}
	if err := iam.RevokeUserToken(ctx, tx, user.ID, tokenID, m.Now); err != nil {
		return err
	}
	return m.recordIAM(ctx, tx, iamChange{
		event: "iam.user_token.revoked", action: iam.UserManage, resourceType: resourceUserToken, resourceID: tokenID,
		version: tokenRevokedVersion, orgID: user.OrgID, before: map[string]any{"user_id": user.ID},
	})
}

// RevokeUserTokens ends all tokens of a user. Without a token it does nothing.
func (s *Service) RevokeUserTokens(ctx context.Context, m Meta, userID string) error {
	_, err := db.RunTx(ctx, s.DB, func(tx db.Tx) (struct{}, error) {
		return struct{}{}, s.revokeUserTokens(ctx, tx, m, userID)
	})
	return err
}

func (s *Service) revokeUserTokens(ctx context.Context, tx db.Tx, m Meta, userID string) error {
	user, err := iam.OfUserOrSelf(ctx, tx, m.Principal, iam.UserManage, userID)
	if err != nil {
		return err
	}
	user, revoked, err := iam.RevokeUserTokens(ctx, tx, user, m.Now)
	if err != nil || revoked == 0 {
		return err
	}
	return m.recordUser(ctx, tx, "iam.user.tokens_revoked", iam.UserManage, user, map[string]any{"tokens": revoked}, nil)
}
