package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// PutEntitlementInput is the whole entitlement.
type PutEntitlementInput struct {
	ProjectID, AppSlug string
	Enabled            bool
	Policy             catalog.Policy
}

// PutEntitlement grants, narrows or withdraws an app for a project. No role of a service account allows it.
func (s *Service) PutEntitlement(ctx context.Context, m Meta, in PutEntitlementInput) (catalog.Entitlement, error) {
	return db.RunTx(ctx, s.DB, func(tx db.Tx) (catalog.Entitlement, error) {
		project, err := iam.InProject(ctx, tx, m.Principal, iam.EntitlementWrite, in.ProjectID)
		if err != nil {
			return catalog.Entitlement{}, err
		}
		before, after, err := catalog.PutEntitlement(ctx, tx, catalog.Entitlement{
			ProjectID: project.ID, OrgID: project.OrgID, AppSlug: in.AppSlug, Enabled: in.Enabled, Policy: in.Policy,
			UpdatedBy: m.Principal.ID,
		}, m.Now)
		if err != nil {
			return catalog.Entitlement{}, err
		}
		change := shipChange{
			event: "apps.entitlement.updated", action: iam.EntitlementWrite, resourceType: resourceEntitlement,
			resourceID: project.ID + "/" + in.AppSlug,
			version:    after.ResourceVersion, orgID: project.OrgID, projectID: project.ID,
			data: map[string]any{"app_slug": in.AppSlug, "enabled": in.Enabled}, after: map[string]any{
				"enabled":          after.Enabled,
				"policy_overrides": after.Policy,
			},
		}
		if before != nil {
			change.before = map[string]any{"enabled": before.Enabled, "policy_overrides": before.Policy}
		}
		return after, m.recordShipping(ctx, tx, change)
	})
}
