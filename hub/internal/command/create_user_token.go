package command

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// CreateUserTokenInput is what the caller chooses.
type CreateUserTokenInput struct {
	UserID, Description string
	// Lifetime of 0 means iam.DefaultTokenLifetime.
	Lifetime time.Duration
}

// CreatedUserToken holds the token's text, which is shown this once.
type CreatedUserToken struct {
	Token iam.UserToken
	Text  string
}

// CreateUserToken makes a personal token.
func (s *Service) CreateUserToken(ctx context.Context, m Meta, in CreateUserTokenInput) (CreatedUserToken, error) {
	if err := iam.Authorize(m.Principal, iam.UserWrite, "", ""); err != nil {
		return CreatedUserToken{}, err
	}
	if in.Lifetime == 0 {
		in.Lifetime = iam.DefaultTokenLifetime
	}
	made := CreatedUserToken{
		Token: iam.UserToken{
			ID: db.NewID(), UserID: in.UserID, Description: in.Description, CreatedAt: m.Now,
			ExpiresAt: m.Now.Add(in.Lifetime),
		},
		Text: iam.NewUserToken(),
	}
	return db.RunTx(ctx, s.DB, func(tx db.Tx) (CreatedUserToken, error) {
		return IdempotentSealed(ctx, tx, m, s.Sealer, func() (CreatedUserToken, error) {
			user, err := iam.GetUser(ctx, tx, in.UserID)
			if err != nil {
				return CreatedUserToken{}, err
			}
			if user.OrgID != "" {
				if err := iam.CheckQuota(ctx, tx, user.OrgID, iam.QuotaUserTokens, m.Now); err != nil {
					return CreatedUserToken{}, err
				}
			}
			if err := iam.CreateUserToken(ctx, tx, made.Token, made.Text); err != nil {
				return CreatedUserToken{}, err
			}
			return made, m.recordIAM(ctx, tx, iamChange{
				event: "iam.user_token.created", action: iam.UserWrite, resourceType: resourceUserToken, resourceID: made.Token.ID,
				version: 1, orgID: user.OrgID,
				after: map[string]any{"user_id": user.ID, "description": in.Description, "expires_at": made.Token.ExpiresAt},
			})
		})
	})
}
