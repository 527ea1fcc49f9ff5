package iam

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// maxCustomRolesPerOrg answers 409 limit_reached when full.
const maxCustomRolesPerOrg = 100

// CustomRole is a role that an org has made of permissions. Its users hold it in the whole org or in a project, as a
// Role that is its id.
type CustomRole struct {
	ID, OrgID, Slug, DisplayName, Description string
	// Permissions are sorted; each is one that an org admin has.
	Permissions []Permission
	// ResourceVersion counts the changes of the role, its making included.
	ResourceVersion int64
	CreatedAt       time.Time
}

// IsCustom reports whether the role is the id of a custom one.
func (r Role) IsCustom() bool { return db.IsID(string(r)) }

const customRoleColumns = `id, org_id, slug, name, description, permissions, resource_version, created_at
	FROM custom_roles`

// CreateCustomRole makes a role of an org that exists. by must hold each of its permissions in the whole org.
func CreateCustomRole(ctx context.Context, tx db.Tx, by Principal, r CustomRole) (CustomRole, error) {
	r, err := r.checked()
	if err != nil {
		return CustomRole{}, err
	}
	if err := mayGrant(by, r.Permissions, r.OrgID, ""); err != nil {
		return CustomRole{}, err
	}
	if err := below(ctx, tx, maxCustomRolesPerOrg, "roles in the org",
		`SELECT count(*) FROM custom_roles WHERE org_id = $1`, r.OrgID); err != nil {
		return CustomRole{}, err
	}
	r.ResourceVersion = 1
	made, err := affects(tx.Exec(ctx, `
		INSERT INTO custom_roles (id, org_id, slug, name, description, permissions, created_at, updated_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $7)
		ON CONFLICT (org_id, slug) DO NOTHING`,
		r.ID, r.OrgID, r.Slug, r.DisplayName, r.Description, r.Permissions, r.CreatedAt))
	if err == nil && !made {
		err = taken("role of this org", "/slug")
	}
	return r, err
}

// GetCustomRole finds a role of the org.
func GetCustomRole(ctx context.Context, tx db.Tx, orgID, id string) (CustomRole, error) {
	r, err := selectByID[CustomRole](ctx, tx, `SELECT `+customRoleColumns+` WHERE id = $1`, id)
	if err == nil && r.OrgID != orgID {
		err = ErrNotFound()
	}
	return r, err
}

// ListCustomRoles lists the roles that an org has made.
func ListCustomRoles(ctx context.Context, tx db.Tx, orgID string, page db.Page) ([]CustomRole, error) {
	return selectPage[CustomRole](ctx, tx, page, `
		SELECT `+customRoleColumns+`
		WHERE org_id = $1 AND ($2::UUID IS NULL OR id > $2::UUID) ORDER BY id LIMIT $3`, orgID)
}

// SetCustomRole replaces name, description and permissions of before by those of r. by must hold what is added in the
// whole org. It changes nothing where they are the same.
func SetCustomRole(ctx context.Context, tx db.Tx, by Principal, before, r CustomRole,
	now time.Time,
) (CustomRole, error) {
	r.ID, r.OrgID, r.Slug, r.ResourceVersion, r.CreatedAt = before.ID, before.OrgID, before.Slug, before.ResourceVersion,
		before.CreatedAt
	r, err := r.checked()
	if err != nil {
		return CustomRole{}, err
	}
	if r.DisplayName == before.DisplayName && r.Description == before.Description &&
		slices.Equal(r.Permissions, before.Permissions) {
		return before, nil
	}
	added := slices.DeleteFunc(slices.Clone(r.Permissions), func(key Permission) bool {
		return slices.Contains(before.Permissions, key)
	})
	if err := mayGrant(by, added, r.OrgID, ""); err != nil {
		return CustomRole{}, err
	}
	err = tx.QueryRow(ctx, `
		UPDATE custom_roles SET name = $2, description = $3, permissions = $4, updated_at = $5,
		       resource_version = resource_version + 1
		WHERE id = $1 RETURNING resource_version`,
		r.ID, r.DisplayName, r.Description, r.Permissions, now).Scan(&r.ResourceVersion)
	return r, err
}

// DeleteCustomRole removes a role that nobody holds, and the invitations that name it.
func DeleteCustomRole(ctx context.Context, tx db.Tx, r CustomRole) error {
	holders, err := db.Value[int](ctx, tx, `
		SELECT (SELECT count(DISTINCT user_id) FROM role_bindings WHERE custom_role_id = $1) +
		       (SELECT count(*) FROM service_accounts WHERE custom_role_id = $1)`, r.ID)
	if err != nil {
		return err
	}
	if holders > 0 {
		return fault.New(fault.Conflict, codeRoleInUse, fmt.Sprintf("%d users and service accounts hold this role; take it "+
			"from the users, and delete the accounts, first.", holders), nil).Permanent()
	}
	if _, err := tx.Exec(ctx,
		`DELETE FROM invitations WHERE org_id = $1 AND $2::TEXT = ANY(roles)`, r.OrgID, r.ID); err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `DELETE FROM custom_roles WHERE id = $1`, r.ID)
	return err
}

// checked returns the role with its permissions sorted.
func (r CustomRole) checked() (CustomRole, error) {
	if err := checkNames(r.Slug, r.DisplayName, "/display_name"); err != nil {
		return r, err
	}
	if len([]rune(r.Description)) > maxDescription {
		return r, invalid().WithHint("/description", "is too long", "at most 2048 characters")
	}
	r.Permissions = slices.Clone(r.Permissions)
	slices.Sort(r.Permissions)
	r.Permissions = slices.Compact(r.Permissions)
	ofOrgs := OrgAdmin.Permissions()
	for _, key := range r.Permissions {
		// What is the platform admins' alone would reach beyond the org.
		if !slices.Contains(ofOrgs, key) {
			return r, invalid().WithHint("/permissions", "has a key that no role of an org can have",
				"the permissions of org_admin: docs/reference/permissions.md")
		}
	}
	if len(r.Permissions) == 0 {
		return r, invalid().WithField("/permissions", "is empty")
	}
	return r, nil
}

// mayGrant refuses to give permissions that by does not hold there.
func mayGrant(by Principal, permissions []Permission, orgID, projectID string) error {
	for _, key := range permissions {
		if err := Authorize(by, key, orgID, projectID); err != nil {
			return err
		}
	}
	return nil
}

// MayGrantAccount refuses to give what a service account may do, where that is more than by may in its project, or is
// for people alone.
func MayGrantAccount(by Principal, sa ServiceAccount) error {
	permissions := sa.CustomPermissions
	if !sa.Role.IsCustom() {
		permissions = sa.Role.Permissions()
	}
	if err := mayGrant(by, permissions, sa.OrgID, sa.ProjectID); err != nil {
		return err
	}
	if i := slices.IndexFunc(permissions, forPeople); i >= 0 {
		return invalid().WithField("/custom_role", "has "+string(permissions[i])+", which no service account may have")
	}
	return nil
}

// CheckGrants checks that the roles of a new user of an org exist, and that by may give them.
func CheckGrants(ctx context.Context, tx db.Tx, by Principal, orgID string, roles []Role) error {
	return checkGrants(ctx, tx, by, orgID, "", roles, nil)
}

// checkGrants checks roles that a user is to hold in the org, or in a project of it. Those that the user does not hold
// yet may have no permission that by does not hold there.
func checkGrants(ctx context.Context, tx db.Tx, by Principal, orgID, projectID string, roles, held []Role) error {
	for _, r := range roles {
		permissions := r.Permissions()
		if r.IsCustom() {
			custom, err := GetCustomRole(ctx, tx, orgID, string(r))
			if fault.Is(err, fault.NotFound) {
				return invalid().WithField("/custom_roles", "there is no such role in the org")
			}
			if err != nil {
				return err
			}
			permissions = custom.Permissions
		}
		if slices.Contains(held, r) {
			continue
		}
		if err := mayGrant(by, permissions, orgID, projectID); err != nil {
			return err
		}
	}
	return nil
}
