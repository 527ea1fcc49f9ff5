package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// CreateProjectInput is what the caller chooses.
type CreateProjectInput struct {
	// OrgID empty means the caller's.
	OrgID             string
	Slug, DisplayName string
}

// CreateProject makes a project in an org.
func (s *Service) CreateProject(ctx context.Context, m Meta, in CreateProjectInput) (iam.Project, error) {
	orgID := in.OrgID
	if orgID == "" {
		orgID = m.Principal.OrgID
	}
	if orgID == "" {
		return iam.Project{}, fault.New(fault.Unprocessable, fault.CodeInvalid, "Name the org: you belong to none yourself.",
			nil).WithField("/org_id", "is required").Permanent()
	}
	if err := iam.Authorize(m.Principal, iam.ProjectCreate, orgID, ""); err != nil {
		return iam.Project{}, err
	}
	wanted := iam.Project{ID: db.NewID(), OrgID: orgID, Slug: in.Slug, DisplayName: in.DisplayName, CreatedAt: m.Now}
	return db.RunTx(ctx, s.DB, func(tx db.Tx) (iam.Project, error) {
		return Idempotent(ctx, tx, m, func() (iam.Project, error) {
			project, err := iam.CreateProject(ctx, tx, wanted)
			if err != nil {
				return iam.Project{}, err
			}
			return project, m.recordIAM(ctx, tx, iamChange{
				event: "iam.project.created", action: iam.ProjectCreate, resourceType: resourceProject, resourceID: project.ID,
				version: 1,
				orgID:   project.OrgID, projectID: project.ID, after: map[string]string{
					"slug":         project.Slug,
					"display_name": project.DisplayName,
				},
			})
		})
	})
}
