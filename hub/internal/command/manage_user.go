package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// DisableUser refuses a user and all tokens of the user from the next request on. A disabled one stays as it is.
func (s *Service) DisableUser(ctx context.Context, m Meta, userID string) (iam.User, error) {
	return db.RunTx(ctx, s.DB, func(tx db.Tx) (iam.User, error) { return s.disableUser(ctx, tx, m, userID) })
}

func (s *Service) disableUser(ctx context.Context, tx db.Tx, m Meta, userID string) (iam.User, error) {
	return setUserDisabled(ctx, tx, m, userID, true, "iam.user.disabled")
}

// EnableUser lets a disabled user in again. An enabled one stays as it is.
func (s *Service) EnableUser(ctx context.Context, m Meta, userID string) (iam.User, error) {
	return db.RunTx(ctx, s.DB, func(tx db.Tx) (iam.User, error) { return s.enableUser(ctx, tx, m, userID) })
}

func (s *Service) enableUser(ctx context.Context, tx db.Tx, m Meta, userID string) (iam.User, error) {
	return setUserDisabled(ctx, tx, m, userID, false, "iam.user.enabled")
}

func setUserDisabled(ctx context.Context, tx db.Tx, m Meta, userID string, disabled bool,
	event string,
) (iam.User, error) {
	user, err := iam.OfUser(ctx, tx, m.Principal, iam.UserManage, userID)
	if err != nil {
		return iam.User{}, err
	}
	return Idempotent(ctx, tx, m, func() (iam.User, error) {
		after, err := iam.SetUserDisabled(ctx, tx, user, disabled, m.Now)
		if err != nil || after.ResourceVersion == user.ResourceVersion {
			return after, err
		}
		return after, m.recordUser(ctx, tx, event, iam.UserManage, after, userState(user), userState(after))
	})
}

// PutUserRoles sets the roles that a user holds in the whole org. platformAdmin nil leaves that property as it is.
func (s *Service) PutUserRoles(ctx context.Context, m Meta, userID string, roles []iam.Role,
	platformAdmin *bool,
) (iam.User, error) {
	return db.RunTx(ctx, s.DB, func(tx db.Tx) (iam.User, error) {
		return s.putUserRoles(ctx, tx, m, userID, roles, platformAdmin)
	})
}

func (s *Service) putUserRoles(ctx context.Context, tx db.Tx, m Meta, userID string, roles []iam.Role,
	platformAdmin *bool,
) (iam.User, error) {
	user, err := iam.OfUser(ctx, tx, m.Principal, iam.RoleWrite, userID)
	if err != nil {
		return iam.User{}, err
	}
	admin := user.PlatformAdmin
	if platformAdmin != nil && *platformAdmin != admin {
		if err := iam.Authorize(m.Principal, iam.UserWrite, "", ""); err != nil {
			return iam.User{}, err
		}
		admin = *platformAdmin
	}
	after, err := iam.SetUserRoles(ctx, tx, user, roles, admin, m.Now)
	if err != nil || after.ResourceVersion == user.ResourceVersion {
		return after, err
	}
	return after, m.recordUser(ctx, tx, "iam.user.roles_changed", iam.RoleWrite, after, userState(user), userState(after))
}

// RemoveOrgUser takes a user out of an org. Removing twice is NotFound.
func (s *Service) RemoveOrgUser(ctx context.Context, m Meta, orgID, userID string) error {
	_, err := db.RunTx(ctx, s.DB, func(tx db.Tx) (struct{}, error) {
		return struct{}{}, s.removeOrgUser(ctx, tx, m, orgID, userID)
	})
	return err
}

func (s *Service) removeOrgUser(ctx context.Context, tx db.Tx, m Meta, orgID, userID string) error {
	user, err := iam.OfUser(ctx, tx, m.Principal, iam.UserManage, userID)
	if err != nil {
		return err
	}
	if user.OrgID != orgID {
		return iam.ErrNotFound()
	}
	after, err := iam.RemoveFromOrg(ctx, tx, user, m.Now)
	if err != nil {
		return err
	}
	after.OrgID = orgID
	return m.recordUser(ctx, tx, "iam.user.removed", iam.UserManage, after, userState(user), nil)
}

func (m Meta) recordUser(ctx context.Context, tx db.Tx, event, action string, u iam.User, before, after any) error {
	return m.recordIAM(ctx, tx, iamChange{
		event: event, action: action, resourceType: resourceUser, resourceID: u.ID, version: u.ResourceVersion,
		orgID:  u.OrgID,
		before: before, after: after,
	})
}

func userState(u iam.User) map[string]any {
	return map[string]any{"email": u.Email, "platform_admin": u.PlatformAdmin, "roles": u.Roles, "disabled": u.Disabled}
}
