package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// PutEntitlement grants, narrows or withdraws an app for a project: in is the whole entitlement. No role of a service
// account allows it.
func (s *Service) PutEntitlement(ctx context.Context, m Meta, in catalog.Entitlement) (catalog.Entitlement, error) {
	check := access.Project(m.Principal, iam.EntitlementWrite, in.ProjectID)
	return run(ctx, s, check, func(tx db.Tx, project iam.Project) (catalog.Entitlement, error) {
		in.OrgID, in.ProjectID, in.UpdatedBy = project.OrgID, project.ID, m.Principal.ID
		before, after, err := catalog.PutEntitlement(ctx, tx, in, m.Now)
		if err != nil {
			return catalog.Entitlement{}, err
		}
		e := change.Entry{
			Event:        "apps.entitlement.updated",
			Action:       iam.EntitlementWrite,
			ResourceType: resourceEntitlement,
			ResourceID:   project.ID + "/" + in.AppSlug,
			Version:      after.ResourceVersion,
			OrgID:        project.OrgID,
			ProjectID:    project.ID,
			Data:         map[string]any{"app_slug": in.AppSlug, "enabled": in.Enabled},
			After:        map[string]any{"enabled": after.Enabled, "policy_overrides": after.Policy},
		}
		if before != nil {
			e.Before = map[string]any{"enabled": before.Enabled, "policy_overrides": before.Policy}
		}
		return after, change.Record(ctx, tx, m.by(), e)
	})
}
