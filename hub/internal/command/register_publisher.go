package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// RegisterPublisher takes a delegation that a catalog key signed offline.
func (s *Service) RegisterPublisher(ctx context.Context, m Meta,
	delegation *protocol.Envelope,
) (catalog.Publisher, error) {
	if err := iam.Authorize(m.Principal, iam.PublisherWrite, "", ""); err != nil {
		return catalog.Publisher{}, err
	}
	verified, err := protocol.VerifyDelegation(delegation, s.Bundle(), m.Now)
	if err != nil {
		return catalog.Publisher{}, refusedDocument(err, codeDelegationRefused, "/delegation")
	}
	return db.RunTx(ctx, s.DB, func(tx db.Tx) (catalog.Publisher, error) {
		return Idempotent(ctx, tx, m, func() (catalog.Publisher, error) {
			orgID := ""
			if slug := verified.Message().GetOrgSlug(); slug != "" {
				org, err := iam.GetOrgBySlug(ctx, tx, slug)
				if fault.Is(err, fault.NotFound) {
					return catalog.Publisher{}, fault.New(fault.Unprocessable, codeOrgUnknown, "The delegation names an org that "+
						"does not exist.", nil).
						WithField("/delegation/payload/org_slug", "is no org's slug").Permanent()
				}
				if err != nil {
					return catalog.Publisher{}, err
				}
				orgID = org.ID
			}
			p, err := catalog.AddPublisher(ctx, tx, verified, m.Now)
			if err != nil {
				return catalog.Publisher{}, err
			}
			told := map[string]any{
				"key_id": p.KeyID, "org_slug": p.OrgSlug, "repository_prefixes": p.RepositoryPrefixes,
				"expires_at": p.ExpiresAt,
			}
			return p, m.recordShipping(ctx, tx, shipChange{
				event: "apps.publisher.registered", action: iam.PublisherWrite, resourceType: resourcePublisher,
				resourceID: p.KeyID + "/" + p.OrgSlug,
				version:    p.ResourceVersion, orgID: orgID, data: told, after: told,
			})
		})
	})
}
