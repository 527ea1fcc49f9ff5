package httpapi

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// ListOrgUsers lists the users of an org.
func (s *Server) ListOrgUsers(ctx context.Context, r ListOrgUsersRequestObject) (ListOrgUsersResponseObject, error) {
	items, next, err := pageByID(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]iam.User, error) {
		return s.Queries.OrgUsers(ctx, principalOf(ctx), r.OrgID, p)
	}, func(v iam.User) string { return v.ID })
	return ListOrgUsers200JSONResponse{Items: views(items, userView), NextCursor: next}, err
}

// RemoveOrgUser removes a user from an org.
func (s *Server) RemoveOrgUser(ctx context.Context, r RemoveOrgUserRequestObject) (RemoveOrgUserResponseObject, error) {
	return RemoveOrgUser204Response{}, s.Commands.RemoveOrgUser(ctx, metaFrom(ctx), r.OrgID, r.UserID)
}

// GetUser gives one user.
func (s *Server) GetUser(ctx context.Context, r GetUserRequestObject) (GetUserResponseObject, error) {
	user, err := s.Queries.User(ctx, principalOf(ctx), r.UserID)
	return GetUser200JSONResponse(userView(user)), err
}

// PutUserRoles sets a user's roles in the whole org.
func (s *Server) PutUserRoles(ctx context.Context, r PutUserRolesRequestObject) (PutUserRolesResponseObject, error) {
	user, err := s.Commands.PutUserRoles(ctx, metaFrom(ctx), r.UserID,
		wantedRoles(r.Body.Roles, r.Body.CustomRoles), r.Body.PlatformAdmin)
	return PutUserRoles200JSONResponse(userView(user)), err
}

// DisableUser refuses a user from the next request on.
func (s *Server) DisableUser(ctx context.Context, r DisableUserRequestObject) (DisableUserResponseObject, error) {
	user, err := s.Commands.DisableUser(ctx, metaFrom(ctx), r.UserID)
	return DisableUser200JSONResponse(userView(user)), err
}

// EnableUser lets a disabled user in again.
func (s *Server) EnableUser(ctx context.Context, r EnableUserRequestObject) (EnableUserResponseObject, error) {
	user, err := s.Commands.EnableUser(ctx, metaFrom(ctx), r.UserID)
	return EnableUser200JSONResponse(userView(user)), err
}

// ListUserTokens lists a user's tokens that count, without their text.
func (s *Server) ListUserTokens(ctx context.Context,
	r ListUserTokensRequestObject,
) (ListUserTokensResponseObject, error) {
	items, next, err := pageByID(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]iam.UserToken, error) {
		return s.Queries.UserTokens(ctx, principalOf(ctx), r.UserID, metaFrom(ctx).Now, p)
	}, func(v iam.UserToken) string { return v.ID })
	return ListUserTokens200JSONResponse{Items: views(items, tokenView), NextCursor: next}, err
}

// RevokeUserTokens ends all tokens of a user.
func (s *Server) RevokeUserTokens(ctx context.Context,
	r RevokeUserTokensRequestObject,
) (RevokeUserTokensResponseObject, error) {
	return RevokeUserTokens204Response{}, s.Commands.RevokeUserTokens(ctx, metaFrom(ctx), r.UserID)
}

// RevokeUserToken ends one token.
func (s *Server) RevokeUserToken(ctx context.Context,
	r RevokeUserTokenRequestObject,
) (RevokeUserTokenResponseObject, error) {
	return RevokeUserToken204Response{}, s.Commands.RevokeUserToken(ctx, metaFrom(ctx), r.UserID, r.TokenID)
}

// ListProjectRoles lists who holds roles in this project only.
func (s *Server) ListProjectRoles(ctx context.Context,
	r ListProjectRolesRequestObject,
) (ListProjectRolesResponseObject, error) {
	items, next, err := pageByID(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]iam.ProjectRoles, error) {
		return s.Queries.ProjectRoles(ctx, principalOf(ctx), r.ProjectID, p)
	}, func(v iam.ProjectRoles) string { return v.UserID })
	return ListProjectRoles200JSONResponse{Items: views(items, projectRolesView), NextCursor: next}, err
}

// PutProjectRoles sets a user's roles in this project only.
func (s *Server) PutProjectRoles(ctx context.Context,
	r PutProjectRolesRequestObject,
) (PutProjectRolesResponseObject, error) {
	roles, err := s.Commands.PutProjectRoles(ctx, metaFrom(ctx), r.ProjectID, r.UserID,
		wantedRoles(r.Body.Roles, r.Body.CustomRoles))
	return PutProjectRoles200JSONResponse(projectRolesView(roles)), err
}

func rolesOf[T ~string](names []T) []iam.Role {
	return views(names, func(n T) iam.Role { return iam.Role(n) })
}

func tokenView(t iam.UserToken) UserTokenInfo {
	return UserTokenInfo{
		ID: t.ID, UserID: t.UserID, Description: t.Description, ExpiresAt: t.ExpiresAt,
		CreatedAt: t.CreatedAt,
	}
}

func projectRolesView(p iam.ProjectRoles) ProjectRoles {
	out := ProjectRoles{UserID: p.UserID, Email: p.Email, DisplayName: p.DisplayName}
	out.Roles, out.CustomRoles = splitRoles[ProjectRole](p.Roles)
	return out
}
