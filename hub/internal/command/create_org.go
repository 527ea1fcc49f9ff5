package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// CreateOrgInput is what the caller chooses.
type CreateOrgInput struct {
	Slug, DisplayName string
}

// CreateOrg makes a tenant.
func (s *Service) CreateOrg(ctx context.Context, m Meta, in CreateOrgInput) (iam.Org, error) {
	if err := iam.Authorize(m.Principal, iam.OrgCreate, "", ""); err != nil {
		return iam.Org{}, err
	}
	org := iam.Org{ID: db.NewID(), Slug: in.Slug, DisplayName: in.DisplayName, CreatedAt: m.Now}
	return db.RunTx(ctx, s.DB, func(tx db.Tx) (iam.Org, error) {
		return Idempotent(ctx, tx, m, func() (iam.Org, error) {
			if err := iam.CreateOrg(ctx, tx, org); err != nil {
				return iam.Org{}, err
			}
			return org, m.recordIAM(ctx, tx, iamChange{
				event: "iam.org.created", action: iam.OrgCreate, resourceType: resourceOrg, resourceID: org.ID, version: 1,
				orgID: org.ID,
				after: map[string]string{"slug": org.Slug, "display_name": org.DisplayName},
			})
		})
	})
}
