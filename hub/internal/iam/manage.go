package iam

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	orgRoles     = "org_admin, org_member, org_billing or app_publisher"
	projectRoles = "project_admin, app_operator or viewer"
)

// ProjectRoles are the roles that a user holds in one project only.
type ProjectRoles struct {
	UserID, Email, DisplayName string
	Roles                      []Role
}

// OfUser finds the user and decides whether p may do permission to it: an admin of the user's org, or a platform admin.
// Only a platform admin changes another platform admin.
func OfUser(ctx context.Context, tx db.Tx, p Principal, permission Permission, userID string) (User, error) {
	u, err := GetUser(ctx, tx, userID)
	if err != nil || p.PlatformAdmin && p.Type == principal.User {
		return u, err
	}
	if u.OrgID == "" {
		return User{}, ErrNotFound()
	}
	if err := Authorize(p, permission, u.OrgID, ""); err != nil {
		return User{}, err
	}
	if u.PlatformAdmin && permission != UserRead {
		return User{}, forbidden(permission)
	}
	return u, nil
}

// OfUserOrSelf is OfUser, except that users may always do it to themselves.
func OfUserOrSelf(ctx context.Context, tx db.Tx, p Principal, permission Permission, userID string) (User, error) {
	if p.Type == principal.User && p.ID == userID {
		return GetUser(ctx, tx, userID)
	}
	return OfUser(ctx, tx, p, permission, userID)
}

// SetUserDisabled refuses the user's tokens, or lets those that are not revoked count again. It changes nothing where
// the user is in that state already.
func SetUserDisabled(ctx context.Context, tx db.Tx, u User, disabled bool, now time.Time) (User, error) {
	if u.Disabled == disabled {
		return u, nil
	}
	if disabled {
		if err := keepsAnAdmin(ctx, tx, u); err != nil {
			return u, err
		}
	}
	u.Disabled = disabled
	return updateUser(ctx, tx, u, now)
}

// Roles are what a user is to hold.
type Roles struct {
	Named []Role
	// Custom are ids of custom roles; nil leaves those that the user holds.
	Custom []Role
}

// of returns all of the roles, for a user who holds some.
func (r Roles) of(held []Role) []Role {
	if r.Custom == nil {
		r.Custom = slices.DeleteFunc(slices.Clone(held), func(h Role) bool { return !h.IsCustom() })
	}
	return slices.Concat(r.Named, r.Custom)
}

// SetUserRoles replaces the roles that the user holds in the whole org; by gives no permission that it does not hold
// itself. It changes nothing where they are the same.
func SetUserRoles(ctx context.Context, tx db.Tx, by Principal, u User, wanted Roles, platformAdmin bool,
	now time.Time,
) (User, error) {
	roles, err := checkRoles(wanted.of(u.Roles), Role.ForUser, orgRoles)
	if err != nil {
		return u, err
	}
	switch {
	case u.OrgID == "" && len(roles) > 0:
		return u, invalid().WithHint("/roles", "roles are held in an org", "this user belongs to none")
	case u.OrgID == "" && !platformAdmin:
		return u, invalid().WithHint("/platform_admin", "is required", "only a platform admin may belong to no org")
	case slices.Equal(roles, u.Roles) && platformAdmin == u.PlatformAdmin:
		return u, nil
	case u.PlatformAdmin && !platformAdmin:
		if err := keepsAnAdmin(ctx, tx, u); err != nil {
			return u, err
		}
	}
	if err := checkGrants(ctx, tx, by, u.OrgID, "", roles, u.Roles); err != nil {
		return u, err
	}
	if err := deleteBindings(ctx, tx, u.ID, orgWide); err != nil {
		return u, err
	}
	if err := insertBindings(ctx, tx, u.ID, roles, "", now); err != nil {
		return u, err
	}
	u.Roles, u.PlatformAdmin = roles, platformAdmin
	return updateUser(ctx, tx, u, now)
}

// RemoveFromOrg takes the user's roles and ends the account with its tokens; its address may be used again. A platform
// admin stays one, without an org.
func RemoveFromOrg(ctx context.Context, tx db.Tx, u User, now time.Time) (User, error) {
	if err := deleteBindings(ctx, tx, u.ID, ""); err != nil {
		return u, err
	}
	u.Roles = nil
	if u.PlatformAdmin {
		u.OrgID = ""
	} else {
		if _, err := revokeTokens(ctx, tx, u.ID, now); err != nil {
			return u, err
		}
		if _, err := tx.Exec(ctx, `DELETE FROM user_passwords WHERE user_id = $1`, u.ID); err != nil {
			return u, err
		}
		if _, err := tx.Exec(ctx, `DELETE FROM user_identities WHERE user_id = $1`, u.ID); err != nil {
			return u, err
		}
		if _, err := tx.Exec(ctx, `UPDATE users SET removed_at = $2 WHERE id = $1`, u.ID, now); err != nil {
			return u, err
		}
		u.Email, u.Disabled = "removed-"+u.ID, true
	}
	return updateUser(ctx, tx, u, now)
}

// SetProjectRoles replaces the roles that a user of the project's org holds in this project only, and returns those
// before; by gives no permission that it does not hold there itself.
func SetProjectRoles(ctx context.Context, tx db.Tx, by Principal, project Project, userID string, wanted Roles,
	now time.Time,
) (before []Role, after User, err error) {
	u, err := GetUser(ctx, tx, userID)
	if err != nil {
		return nil, User{}, err
	}
	if u.OrgID != project.OrgID {
		return nil, User{}, ErrNotFound()
	}
	before, err = db.Select(ctx, tx, pgx.RowTo[Role],
		`SELECT role FROM role_bindings WHERE user_id = $1 AND scope = $2 ORDER BY role`, u.ID, project.ID)
	if err != nil {
		return nil, User{}, err
	}
	roles, err := checkRoles(wanted.of(before), Role.ForProject, projectRoles)
	if err == nil {
		err = checkGrants(ctx, tx, by, project.OrgID, project.ID, roles, before)
	}
	if err != nil {
		return nil, User{}, err
	}
	u.Roles = roles
	if slices.Equal(before, roles) {
		return before, u, nil
	}
	if err := deleteBindings(ctx, tx, u.ID, project.ID); err != nil {
		return nil, User{}, err
	}
	if err := insertBindings(ctx, tx, u.ID, roles, project.ID, now); err != nil {
		return nil, User{}, err
	}
	after, err = updateUser(ctx, tx, u, now)
	return before, after, err
}

// ListProjectRoles lists the users who hold roles in this project only.
func ListProjectRoles(ctx context.Context, tx db.Tx, projectID string, page db.Page) ([]ProjectRoles, error) {
	return selectPage[ProjectRoles](ctx, tx, page, `
		SELECT u.id, u.email, u.name, array_agg(b.role ORDER BY b.role)
		FROM role_bindings b JOIN users u ON u.id = b.user_id
		WHERE b.scope = $1 AND ($2::UUID IS NULL OR u.id > $2::UUID)
		GROUP BY u.id, u.email, u.name ORDER BY u.id LIMIT $3`, projectID)
}

// RevokeUserToken ends one token of the user. One that does not count any more is NotFound.
func RevokeUserToken(ctx context.Context, tx db.Tx, userID, tokenID string, now time.Time) error {
	if !db.IsID(tokenID) {
		return ErrNotFound()
	}
	revoked, err := affects(tx.Exec(ctx, `
		UPDATE user_tokens SET revoked_at = $3
		WHERE id = $2 AND user_id = $1 AND revoked_at IS NULL AND expires_at > $3 AND session_id IS NULL`,
		userID, tokenID, now))
	if err == nil && !revoked {
		err = ErrNotFound()
	}
	return err
}

// RevokeUserTokens ends every token and session of the user and returns how many there were.
func RevokeUserTokens(ctx context.Context, tx db.Tx, u User, now time.Time) (User, int64, error) {
	revoked, err := revokeTokens(ctx, tx, u.ID, now)
	if err != nil || revoked == 0 {
		return u, 0, err
	}
	u, err = updateUser(ctx, tx, u, now)
	return u, revoked, err
}

// keepsAnAdmin refuses to take the last platform admin whose tokens count.
func keepsAnAdmin(ctx context.Context, tx db.Tx, u User) error {
	if !u.PlatformAdmin || u.Disabled {
		return nil
	}
	other, err := db.Value[bool](ctx, tx,
		`SELECT EXISTS (SELECT 1 FROM users WHERE platform_admin AND disabled_at IS NULL AND id <> $1)`, u.ID)
	if err == nil && !other {
		err = fault.New(fault.Conflict, codeLastPlatformAdmin, "This is the last platform admin; make another one first.",
			nil).Permanent()
	}
	return err
}

func checkRoles(roles []Role, may func(Role) bool, hint string) ([]Role, error) {
	for _, r := range roles {
		if !may(r) && !r.IsCustom() {
			return nil, invalid().WithHint("/roles", "is no role that can be held here", hint)
		}
	}
	roles = slices.Clone(roles)
	slices.Sort(roles)
	return slices.Compact(roles), nil
}
