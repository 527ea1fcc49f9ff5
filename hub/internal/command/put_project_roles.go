package command

import (
	"context"
	"slices"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// PutProjectRoles sets the roles that a user of the org holds in one project only. No role takes the user out of the
// project.
func (s *Service) PutProjectRoles(ctx context.Context, m Meta, projectID, userID string,
	roles []iam.Role,
) (iam.ProjectRoles, error) {
	return db.RunTx(ctx, s.DB, func(tx db.Tx) (iam.ProjectRoles, error) {
		return s.putProjectRoles(ctx, tx, m, projectID, userID, roles)
	})
}

func (s *Service) putProjectRoles(ctx context.Context, tx db.Tx, m Meta, projectID, userID string,
	roles []iam.Role,
) (iam.ProjectRoles, error) {
	project, err := iam.InProject(ctx, tx, m.Principal, iam.RoleWrite, projectID)
	if err != nil {
		return iam.ProjectRoles{}, err
	}
	before, user, err := iam.SetProjectRoles(ctx, tx, project, userID, roles, m.Now)
	if err != nil {
		return iam.ProjectRoles{}, err
	}
	out := iam.ProjectRoles{UserID: user.ID, Email: user.Email, DisplayName: user.DisplayName, Roles: user.Roles}
	if slices.Equal(before, user.Roles) {
		return out, nil
	}
	return out, m.recordIAM(ctx, tx, iamChange{
		event: "iam.user.project_roles_changed", action: iam.RoleWrite, resourceType: resourceUser, resourceID: user.ID,
		version: user.ResourceVersion, orgID: project.OrgID, projectID: project.ID,
		before: map[string]any{"roles": before}, after: map[string]any{"roles": user.Roles},
	})
}
