package httpapi

import (
	"context"
	"slices"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// ListCustomRoles lists the roles that an org has made.
func (s *Server) ListCustomRoles(ctx context.Context,
	r ListCustomRolesRequestObject,
) (ListCustomRolesResponseObject, error) {
	items, next, err := pageByID(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]iam.CustomRole, error) {
		return s.Queries.CustomRoles(ctx, principalOf(ctx), r.OrgID, p)
	}, func(v iam.CustomRole) string { return v.ID })
	return ListCustomRoles200JSONResponse{Items: views(items, customRoleView), NextCursor: next}, err
}

// CreateCustomRole makes a role of permissions.
func (s *Server) CreateCustomRole(ctx context.Context,
	r CreateCustomRoleRequestObject,
) (CreateCustomRoleResponseObject, error) {
	role, err := s.Commands.CreateCustomRole(ctx, metaFrom(ctx), iam.CustomRole{
		OrgID:       r.OrgID,
		Slug:        r.Body.Slug,
		DisplayName: r.Body.DisplayName,
		Description: r.Body.Description,
		Permissions: r.Body.Permissions,
	})
	return CreateCustomRole201JSONResponse(customRoleView(role)), err
}

// GetCustomRole gives one role.
func (s *Server) GetCustomRole(ctx context.Context, r GetCustomRoleRequestObject) (GetCustomRoleResponseObject, error) {
	role, err := s.Queries.CustomRole(ctx, principalOf(ctx), r.OrgID, r.RoleID)
	return GetCustomRole200JSONResponse(customRoleView(role)), err
}

// PutCustomRole replaces a role.
func (s *Server) PutCustomRole(ctx context.Context, r PutCustomRoleRequestObject) (PutCustomRoleResponseObject, error) {
	role, err := s.Commands.PutCustomRole(ctx, metaFrom(ctx), iam.CustomRole{
		ID:          r.RoleID,
		OrgID:       r.OrgID,
		DisplayName: r.Body.DisplayName,
		Description: r.Body.Description,
		Permissions: r.Body.Permissions,
	})
	return PutCustomRole200JSONResponse(customRoleView(role)), err
}

// DeleteCustomRole removes a role.
func (s *Server) DeleteCustomRole(ctx context.Context,
	r DeleteCustomRoleRequestObject,
) (DeleteCustomRoleResponseObject, error) {
	return DeleteCustomRole204Response{}, s.Commands.DeleteCustomRole(ctx, metaFrom(ctx), r.OrgID, r.RoleID)
}

func customRoleView(r iam.CustomRole) CustomRole {
	return CustomRole{
		ID:              r.ID,
		OrgID:           r.OrgID,
		Slug:            r.Slug,
		DisplayName:     r.DisplayName,
		Description:     r.Description,
		Permissions:     r.Permissions,
		ResourceVersion: r.ResourceVersion,
		CreatedAt:       r.CreatedAt,
	}
}

// wantedRoles are the roles of a body; custom is nil where the body does not have them.
func wantedRoles[T ~string](named []T, custom *[]string) iam.Roles {
	out := iam.Roles{Named: rolesOf(named)}
	if custom != nil {
		out.Custom = rolesOf(*custom)
	}
	return out
}

// splitRoles separates the roles of the contract from the ids of custom ones.
func splitRoles[T ~string](held []iam.Role) (named []T, custom []string) {
	isCustom := func(r iam.Role) bool { return r.IsCustom() }
	named = views(slices.DeleteFunc(slices.Clone(held), isCustom), func(r iam.Role) T { return T(r) })
	for _, r := range held {
		if isCustom(r) {
			custom = append(custom, string(r))
		}
	}
	return named, custom
}
