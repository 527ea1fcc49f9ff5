package command

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// CreateUser makes a user. It sets the user's id and time.
func (s *Service) CreateUser(ctx context.Context, m Meta, wanted iam.User) (iam.User, error) {
	wanted.ID, wanted.CreatedAt = db.NewID(), m.Now
	return once(ctx, s, m, access.Platform(m.Principal, iam.UserWrite), func(tx db.Tx,
		_ access.Nothing,
	) (iam.User, error) {
		if err := iam.CheckGrants(ctx, tx, m.Principal, wanted.OrgID, wanted.Roles); err != nil {
			return iam.User{}, err
		}
		user, err := iam.CreateUser(ctx, tx, wanted)
		if err != nil {
			return iam.User{}, err
		}
		return user, m.recordUser(ctx, tx, "iam.user.created", iam.UserWrite, user, nil, map[string]any{
			"email":          user.Email,
			"display_name":   user.DisplayName,
			"platform_admin": user.PlatformAdmin,
			"roles":          user.Roles,
		})
	})
}

// DisableUser refuses a user and all tokens of the user from the next request on. A disabled one stays as it is.
func (s *Service) DisableUser(ctx context.Context, m Meta, userID string) (iam.User, error) {
	return s.setUserDisabled(ctx, m, userID, true, "iam.user.disabled")
}

// EnableUser lets a disabled user in again. An enabled one stays as it is.
func (s *Service) EnableUser(ctx context.Context, m Meta, userID string) (iam.User, error) {
	return s.setUserDisabled(ctx, m, userID, false, "iam.user.enabled")
}

func (s *Service) setUserDisabled(ctx context.Context, m Meta, userID string, disabled bool,
	eventType string,
) (iam.User, error) {
	return once(ctx, s, m, access.User(m.Principal, iam.UserManage, userID), func(tx db.Tx,
		user iam.User,
	) (iam.User, error) {
		after, err := iam.SetUserDisabled(ctx, tx, user, disabled, m.Now)
		if err != nil || after.ResourceVersion == user.ResourceVersion {
			return after, err
		}
		return after, m.recordUser(ctx, tx, eventType, iam.UserManage, after, userState(user), userState(after))
	})
}

// PutUserRoles sets the roles that a user holds in the whole org. platformAdmin nil leaves that property as it is.
func (s *Service) PutUserRoles(ctx context.Context, m Meta, userID string, roles iam.Roles,
	platformAdmin *bool,
) (iam.User, error) {
	return run(ctx, s, access.User(m.Principal, iam.RoleWrite, userID), func(tx db.Tx, user iam.User) (iam.User, error) {
		admin := user.PlatformAdmin
		if platformAdmin != nil && *platformAdmin != admin {
			if err := iam.Authorize(m.Principal, iam.UserWrite, "", ""); err != nil {
				return iam.User{}, err
			}
			admin = *platformAdmin
		}
		after, err := iam.SetUserRoles(ctx, tx, m.Principal, user, roles, admin, m.Now)
		if err != nil || after.ResourceVersion == user.ResourceVersion {
			return after, err
		}
		return after, m.recordUser(ctx, tx, "iam.user.roles_changed", iam.RoleWrite, after, userState(user),
			userState(after))
	})
}

// RemoveOrgUser takes a user out of an org. Removing twice is NotFound.
func (s *Service) RemoveOrgUser(ctx context.Context, m Meta, orgID, userID string) error {
	return do(ctx, s, access.User(m.Principal, iam.UserManage, userID), func(tx db.Tx, user iam.User) error {
		if user.OrgID != orgID {
			return iam.ErrNotFound()
		}
		after, err := iam.RemoveFromOrg(ctx, tx, user, m.Now)
		if err != nil {
			return err
		}
		after.OrgID = orgID
		return m.recordUser(ctx, tx, "iam.user.removed", iam.UserManage, after, userState(user), nil)
	})
}

func (m Meta) recordUser(ctx context.Context, tx db.Tx, eventType, action string, u iam.User, before,
	after any,
) error {
	return change.Record(ctx, tx, m.by(), change.Entry{
		Event:        eventType,
		Action:       action,
		ResourceType: resourceUser,
		ResourceID:   u.ID,
		Version:      u.ResourceVersion,
		OrgID:        u.OrgID,
		Before:       before,
		After:        after,
	})
}

func userState(u iam.User) map[string]any {
	return map[string]any{"email": u.Email, "platform_admin": u.PlatformAdmin, "roles": u.Roles, "disabled": u.Disabled}
}

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
	if in.Lifetime == 0 {
		in.Lifetime = iam.DefaultTokenLifetime
	}
	made := CreatedUserToken{
		Token: iam.UserToken{
			ID:          db.NewID(),
			UserID:      in.UserID,
			Description: in.Description,
			CreatedAt:   m.Now,
			ExpiresAt:   m.Now.Add(in.Lifetime),
		},
		Text: iam.NewUserToken(),
	}
	check := access.Platform(m.Principal, iam.UserWrite)
	return onceSealed(ctx, s, m, s.Sealer, check, func(tx db.Tx, _ access.Nothing) (CreatedUserToken, error) {
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
		return made, change.Record(ctx, tx, m.by(), change.Entry{
			Event:        "iam.user_token.created",
			Action:       iam.UserWrite,
			ResourceType: resourceUserToken,
			ResourceID:   made.Token.ID,
			OrgID:        user.OrgID,
			After:        map[string]any{"user_id": user.ID, "description": in.Description, "expires_at": made.Token.ExpiresAt},
		})
	})
}

// tokenRevokedVersion follows version 1, the token as it was made: a token changes once.
const tokenRevokedVersion = 2

// RevokeUserToken ends one token: of one's own, or of a user of an org that the caller administers. Revoking twice is
// NotFound.
func (s *Service) RevokeUserToken(ctx context.Context, m Meta, userID, tokenID string) error {
	return do(ctx, s, access.UserOrSelf(m.Principal, iam.UserManage, userID), func(tx db.Tx, user iam.User) error {
		if err := iam.RevokeUserToken(ctx, tx, user.ID, tokenID, m.Now); err != nil {
			return err
		}
		return change.Record(ctx, tx, m.by(), change.Entry{
			Event:        "iam.user_token.revoked",
			Action:       iam.UserManage,
			ResourceType: resourceUserToken,
			ResourceID:   tokenID,
			Version:      tokenRevokedVersion,
			OrgID:        user.OrgID,
			Before:       map[string]any{"user_id": user.ID},
		})
	})
}

// RevokeUserTokens ends all tokens of a user. Without a token it does nothing.
func (s *Service) RevokeUserTokens(ctx context.Context, m Meta, userID string) error {
	return do(ctx, s, access.UserOrSelf(m.Principal, iam.UserManage, userID), func(tx db.Tx, user iam.User) error {
		user, revoked, err := iam.RevokeUserTokens(ctx, tx, user, m.Now)
		if err != nil || revoked == 0 {
			return err
		}
		return m.recordUser(ctx, tx, "iam.user.tokens_revoked", iam.UserManage, user,
			map[string]any{"tokens": revoked}, nil)
	})
}
