package command

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// Bootstrap makes what a hub cannot serve without: the key for access tokens, and the first platform admin. It is
// called at every start. text is a token made by iam.NewUserToken, kept by the caller before the call, so that a crash
// in between loses no token that counts; made says whether it counts.
func (s *Service) Bootstrap(ctx context.Context, text string, now time.Time) (made bool, err error) {
	keyID, userID, tokenID := db.NewID(), db.NewID(), db.NewID()
	return db.RunTx(ctx, s.DB, func(tx db.Tx) (bool, error) {
		if err := iam.EnsureSigningKey(ctx, tx, s.Sealer, keyID, now); err != nil {
			return false, err
		}
		admin, made, err := iam.Bootstrap(ctx, tx, userID, tokenID, text, now)
		if err != nil || !made {
			return false, err
		}
		return true, bySystem(tokenID, now).recordIAM(ctx, tx, iamChange{
			event: "iam.user.created", action: "iam.bootstrap", resourceType: resourceUser, resourceID: admin.ID, version: 1,
			after: map[string]any{"email": admin.Email, "platform_admin": true, "user_token_id": tokenID},
		})
	})
}

// RecoverAdmin gives the first platform admin a new token; for whoever runs the hub's program on its own machine. It
// makes text the only token that counts for the first platform admin.
func (s *Service) RecoverAdmin(ctx context.Context, text string, now time.Time) error {
	tokenID := db.NewID()
	_, err := db.RunTx(ctx, s.DB, func(tx db.Tx) (struct{}, error) {
		admin, err := iam.RecoverAdmin(ctx, tx, tokenID, text, now)
		if err != nil {
			return struct{}{}, err
		}
		return struct{}{}, bySystem(tokenID, now).recordIAM(ctx, tx, iamChange{
			event: "iam.user_token.created", action: "iam.recover_admin", resourceType: resourceUserToken, resourceID: tokenID,
			version: 1,
			after:   map[string]any{"user_id": admin.ID, "email": admin.Email},
		})
	})
	return err
}

// bySystem is the Meta of what no request asked for.
func bySystem(correlationID string, now time.Time) Meta {
	return Meta{CorrelationID: correlationID, Now: now}
}
