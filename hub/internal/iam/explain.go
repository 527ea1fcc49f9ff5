package iam

import (
	"context"
	"slices"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
)

// Reason is why a decision was made.
type Reason string

// The reasons. RoleMissing is that the principal holds no role there that has the permission.
const (
	Permitted   Reason = "permitted"
	RoleMissing Reason = "role_missing"
	OtherOrg    Reason = "other_org"
	IsDisabled  Reason = "disabled"
	// IsManaged and IsAttached are about an app instance that another one operates.
	IsManaged  Reason = "platform_managed"
	IsAttached Reason = "attached"
)

// Explanation is a decision and what would change it.
type Explanation struct {
	Decision
	Reason Reason
	// About is whom the decision is about.
	About principal.Actor
	// Roles are those that have the permission; CustomRoles those of the principal that have it there.
	Roles, CustomRoles []Role
}

// Explain decides as Decide does, or as AuthorizeOperation where it is about an app instance, and says why.
func Explain(p Principal, permission Permission, orgID, projectID string, on OnInstance) (Explanation, error) {
	if !slices.Contains(Permissions(), permission) {
		return Explanation{}, invalid().WithHint("/permission", "is no permission",
			"docs/reference/permissions.md lists them; one looks like apps.instance.create")
	}
	decision, err := policies().decide(p, permission, orgID, projectID, on)
	if err != nil {
		return Explanation{}, err
	}
	out := Explanation{Decision: decision, Reason: RoleMissing, About: p.Actor()}
	forbade := func(id string) bool {
		return !decision.Allowed && slices.ContainsFunc(decision.Rules, func(r Rule) bool { return r.ID == id })
	}
	switch {
	case decision.Allowed:
		out.Reason = Permitted
	case forbade(disabledRule):
		out.Reason = IsDisabled
	case forbade(tenantBoundary):
		out.Reason = OtherOrg
	case forbade(platformManaged):
		out.Reason = IsManaged
	case forbade(attachedRule):
		out.Reason = IsAttached
	}
	for _, r := range roles() {
		if slices.Contains(r.Permissions(), permission) {
			out.Roles = append(out.Roles, r)
		}
	}
	for _, b := range p.Bindings {
		here := b.ProjectID == "" || b.ProjectID == projectID || orgID == ""
		if here && slices.Contains(b.Permissions, permission) && !slices.Contains(out.CustomRoles, b.Role) {
			out.CustomRoles = append(out.CustomRoles, b.Role)
		}
	}
	return out, nil
}

const (
	selectAccount = `SELECT ` + serviceAccountColumns + `
		FROM service_accounts s WHERE s.id = $1 AND s.deleted_at IS NULL`
	selectPrincipal = `SELECT ` + userPrincipalColumns + `
		FROM users u ` + userBindings + ` LEFT JOIN user_tokens t ON FALSE WHERE u.id = $1`
)

// PrincipalOf finds another principal for p, who must be allowed to read the roles that it holds.
func PrincipalOf(ctx context.Context, tx db.Tx, p Principal, of principal.Actor) (Principal, error) {
	if of.Type == principal.ServiceAccount {
		sa, err := selectByID[ServiceAccount](ctx, tx, selectAccount, of.ID)
		if err != nil {
			return Principal{}, err
		}
		return sa.principal(), Authorize(p, ServiceAccountRead, sa.OrgID, sa.ProjectID)
	}
	u, err := OfUser(ctx, tx, p, RoleRead, of.ID)
	if err != nil {
		return Principal{}, err
	}
	return selectUserPrincipal(ctx, tx, nil, selectPrincipal, u.ID)
}

// CurrentPrincipal finds a user or service account as it is now, for what the hub does in its name while it makes no
// request.
func CurrentPrincipal(ctx context.Context, tx db.Tx, of principal.Actor) (Principal, error) {
	if of.Type == principal.ServiceAccount {
		sa, err := selectByID[ServiceAccount](ctx, tx, selectAccount, of.ID)
		return sa.principal(), err
	}
	p, err := selectUserPrincipal(ctx, tx, nil, selectPrincipal+` AND u.removed_at IS NULL`, of.ID)
	if err == nil && p.ID == "" {
		err = ErrNotFound()
	}
	return p, err
}
