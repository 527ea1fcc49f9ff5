package httpapi

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/internal/query"
)

// ExplainAccess says why a permission is held, or why not.
func (s *Server) ExplainAccess(ctx context.Context, r ExplainAccessRequestObject) (ExplainAccessResponseObject, error) {
	why, err := s.Queries.Explain(ctx, principalOf(ctx), query.Question{
		Permission: r.Body.Permission,
		Of:         access.Scope{OrgID: r.Body.OrgID, ProjectID: r.Body.ProjectID},
		InstanceID: r.Body.AppInstanceID,
		About:      principal.Actor{Type: principal.Type(r.Body.Principal.Type), ID: r.Body.Principal.ID},
	})
	if err != nil {
		return nil, err
	}
	return ExplainAccess200JSONResponse{
		Allowed:    why.Allowed,
		Reason:     AccessExplanationReason(why.Reason),
		Permission: r.Body.Permission,
		Principal:  AccessPrincipal{Type: AccessPrincipalType(why.About.Type), ID: why.About.ID},
		OrgID:      why.Of.OrgID,
		ProjectID:  why.Of.ProjectID,

		AppInstanceID: r.Body.AppInstanceID,
		Rules: views(why.Rules, func(r iam.Rule) AccessRule {
			return AccessRule{ID: r.ID, Description: r.Description}
		}),
		CustomRoles:         views(why.CustomRoles, func(r iam.Role) string { return string(r) }),
		RolesWithPermission: views(why.Roles, func(r iam.Role) string { return string(r) }),
	}, nil
}
