package command

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// Bootstrap makes what a hub cannot serve without: the key for access tokens, and the first platform admin. It is
// called at every start. text is a token made by iam.NewUserToken, kept by the caller before the call, so that a crash
// in between loses no token that counts; made says whether it counts.
func (s *Service) Bootstrap(ctx context.Context, text string, now time.Time) (made bool, err error) {
	keyID, userID, tokenID := db.NewID(), db.NewID(), db.NewID()
	return run(ctx, s, access.Anyone, func(tx db.Tx, _ access.Nothing) (bool, error) {
		if err := iam.EnsureSigningKey(ctx, tx, s.Sealer, keyID, now); err != nil {
			return false, err
		}
		admin, made, err := iam.Bootstrap(ctx, tx, userID, tokenID, text, now)
		if err != nil || !made {
			return false, err
		}
		return true, change.Record(ctx, tx, change.BySystem(tokenID, now), change.Entry{
			Event: "iam.user.created", Action: "iam.bootstrap", ResourceType: resourceUser, ResourceID: admin.ID, Version: 1,
			After: map[string]any{"email": admin.Email, "platform_admin": true, "user_token_id": tokenID},
		})
	})
}

// SetAdminPassword sets the password by which the first platform admin logs in, and returns that admin. It is for the
// operator, on the hub's own machine.
func (s *Service) SetAdminPassword(ctx context.Context, password string, now time.Time) (iam.User, error) {
	if err := iam.CheckPassword(password); err != nil {
		return iam.User{}, err
	}
	var hash string
	if err := s.hash(ctx, func() { hash = iam.HashPassword(password) }); err != nil {
		return iam.User{}, err
	}
	eventID := db.NewID()
	return run(ctx, s, access.Anyone, func(tx db.Tx, _ access.Nothing) (iam.User, error) {
		admin, err := iam.SetFirstAdminPassword(ctx, tx, hash, now)
		if err != nil {
			return iam.User{}, err
		}
		return admin, change.Record(ctx, tx, change.BySystem(eventID, now), change.Entry{
			Event: "iam.user.password_changed", Action: "iam.recover_admin", ResourceType: resourceUser, ResourceID: admin.ID,
			Version: admin.ResourceVersion,
			After:   map[string]any{"email": admin.Email, "password": true, "one_time_codes": "removed"},
		})
	})
}

// RecoverAdmin makes text the only token that counts for the first platform admin. It is for the operator, on the hub's
// own machine.
func (s *Service) RecoverAdmin(ctx context.Context, text string, now time.Time) error {
	tokenID := db.NewID()
	return do(ctx, s, access.Anyone, func(tx db.Tx, _ access.Nothing) error {
		admin, err := iam.RecoverAdmin(ctx, tx, tokenID, text, now)
		if err != nil {
			return err
		}
		return change.Record(ctx, tx, change.BySystem(tokenID, now), change.Entry{
			Event: "iam.user_token.created", Action: "iam.recover_admin", ResourceType: resourceUserToken, ResourceID: tokenID,
			Version: 1,
			After:   map[string]any{"user_id": admin.ID, "email": admin.Email},
		})
	})
}
