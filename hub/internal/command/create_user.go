package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// CreateUserInput is what the caller chooses.
type CreateUserInput struct {
	OrgID, Email, DisplayName string
	PlatformAdmin             bool
	Roles                     []iam.Role
}

// CreateUser makes a user.
func (s *Service) CreateUser(ctx context.Context, m Meta, in CreateUserInput) (iam.User, error) {
	if err := iam.Authorize(m.Principal, iam.UserWrite, "", ""); err != nil {
		return iam.User{}, err
	}
	wanted := iam.User{
		ID: db.NewID(), OrgID: in.OrgID, Email: in.Email, DisplayName: in.DisplayName, PlatformAdmin: in.PlatformAdmin,
		Roles: in.Roles, CreatedAt: m.Now,
	}
	return db.RunTx(ctx, s.DB, func(tx db.Tx) (iam.User, error) {
		return Idempotent(ctx, tx, m, func() (iam.User, error) {
			user, err := iam.CreateUser(ctx, tx, wanted)
			if err != nil {
				return iam.User{}, err
			}
			return user, m.recordIAM(ctx, tx, iamChange{
				event: "iam.user.created", action: iam.UserWrite, resourceType: resourceUser, resourceID: user.ID, version: 1,
				orgID: user.OrgID,
				after: map[string]any{
					"email": user.Email, "display_name": user.DisplayName, "platform_admin": user.PlatformAdmin,
					"roles": user.Roles,
				},
			})
		})
	})
}
