package command

import (
	"cmp"
	"context"
	"slices"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// CreateOrg makes a tenant. It sets the org's id and time.
func (s *Service) CreateOrg(ctx context.Context, m Meta, org iam.Org) (iam.Org, error) {
	org.ID, org.CreatedAt = db.NewID(), m.Now
	check := access.Platform(m.Principal, iam.OrgCreate)
	return once(ctx, s, m, check, func(tx db.Tx, _ access.Nothing) (iam.Org, error) {
		if err := iam.CreateOrg(ctx, tx, org); err != nil {
			return iam.Org{}, err
		}
		return org, change.Record(ctx, tx, m.by(), change.Entry{
			Event:        "iam.org.created",
			Action:       iam.OrgCreate,
			ResourceType: resourceOrg,
			ResourceID:   org.ID,
			OrgID:        org.ID,
			After:        map[string]string{"slug": org.Slug, "display_name": org.DisplayName},
		})
	})
}

// PutOrgQuota sets what an org may hold. It replaces the limits that were set; quotas that are not named get the
// default.
func (s *Service) PutOrgQuota(ctx context.Context, m Meta, orgID string, set iam.Limits) (iam.Org, error) {
	check := access.Platform(m.Principal, iam.QuotaWrite)
	return run(ctx, s, check, func(tx db.Tx, _ access.Nothing) (iam.Org, error) {
		org, err := iam.GetOrg(ctx, tx, orgID)
		if err != nil {
			return iam.Org{}, err
		}
		before, err := iam.LimitsOf(ctx, tx, org.ID)
		if err != nil {
			return iam.Org{}, err
		}
		version, err := iam.SetLimits(ctx, tx, org.ID, set, m.Now)
		if err != nil {
			return iam.Org{}, err
		}
		after, err := iam.LimitsOf(ctx, tx, org.ID)
		if err != nil {
			return iam.Org{}, err
		}
		return org, change.Record(ctx, tx, m.by(), change.Entry{
			Event:        "iam.org.quota_changed",
			Action:       iam.QuotaWrite,
			ResourceType: resourceOrg,
			ResourceID:   org.ID,
			Version:      version,
			OrgID:        org.ID,
			Before:       before,
			After:        after,
		})
	})
}

// CreateProject makes a project in an org; an empty org is the caller's. It sets the project's id and time. The
// platform's project takes the permission to make orgs besides.
func (s *Service) CreateProject(ctx context.Context, m Meta, wanted iam.Project) (iam.Project, error) {
	wanted.ID, wanted.CreatedAt = db.NewID(), m.Now
	wanted.OrgID = cmp.Or(wanted.OrgID, m.Principal.OrgID)
	if wanted.OrgID == "" {
		return iam.Project{}, fault.New(fault.Unprocessable, fault.CodeInvalid, "Name the org: you belong to none yourself.",
			nil).WithField("/org_id", "is required").Permanent()
	}
	check := access.OrgID(m.Principal, iam.ProjectCreate, wanted.OrgID)
	return once(ctx, s, m, check, func(tx db.Tx, _ access.Nothing) (iam.Project, error) {
		if wanted.Platform {
			if err := iam.Authorize(m.Principal, iam.OrgCreate, "", ""); err != nil {
				return iam.Project{}, err
			}
		}
		project, err := iam.CreateProject(ctx, tx, wanted)
		if err != nil {
			return iam.Project{}, err
		}
		return project, change.Record(ctx, tx, m.by(), change.Entry{
			Event:        "iam.project.created",
			Action:       iam.ProjectCreate,
			ResourceType: resourceProject,
			ResourceID:   project.ID,
			OrgID:        project.OrgID,
			ProjectID:    project.ID,
			After: map[string]any{
				"slug": project.Slug, "display_name": project.DisplayName, "platform": project.Platform,
			},
		})
	})
}

// PutProjectRoles sets the roles that a user of the org holds in one project only. No role takes the user out of the
// project.
func (s *Service) PutProjectRoles(ctx context.Context, m Meta, projectID, userID string,
	roles iam.Roles,
) (iam.ProjectRoles, error) {
	check := access.Project(m.Principal, iam.RoleWrite, projectID)
	return run(ctx, s, check, func(tx db.Tx, project iam.Project) (iam.ProjectRoles, error) {
		before, user, err := iam.SetProjectRoles(ctx, tx, m.Principal, project, userID, roles, m.Now)
		if err != nil {
			return iam.ProjectRoles{}, err
		}
		out := iam.ProjectRoles{UserID: user.ID, Email: user.Email, DisplayName: user.DisplayName, Roles: user.Roles}
		if slices.Equal(before, user.Roles) {
			return out, nil
		}
		return out, change.Record(ctx, tx, m.by(), change.Entry{
			Event:        "iam.user.project_roles_changed",
			Action:       iam.RoleWrite,
			ResourceType: resourceUser,
			ResourceID:   user.ID,
			Version:      user.ResourceVersion,
			OrgID:        project.OrgID,
			ProjectID:    project.ID,
			Before:       map[string]any{"roles": before},
			After:        map[string]any{"roles": user.Roles},
		})
	})
}
