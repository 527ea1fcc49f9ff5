package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// RegisterPublisher takes a delegation that a catalog key signed offline.
func (s *Service) RegisterPublisher(ctx context.Context, m Meta,
	delegation *protocol.Envelope,
) (catalog.Publisher, error) {
	check := access.Platform(m.Principal, iam.PublisherWrite)
	return once(ctx, s, m, check, func(tx db.Tx, _ access.Nothing) (catalog.Publisher, error) {
		verified, err := protocol.VerifyDelegation(delegation, s.Bundle(), m.Now)
		if err != nil {
			return catalog.Publisher{}, refusedDocument(err, codeDelegationRefused, "/delegation")
		}
		orgID, err := delegatedOrg(ctx, tx, verified.Message().GetOrgSlug())
		if err != nil {
			return catalog.Publisher{}, err
		}
		p, err := catalog.AddPublisher(ctx, tx, verified, m.Now)
		if err != nil {
			return catalog.Publisher{}, err
		}
		data := map[string]any{
			"key_id":              p.KeyID,
			"org_slug":            p.OrgSlug,
			"repository_prefixes": p.RepositoryPrefixes,
			"expires_at":          p.ExpiresAt,
		}
		return p, change.Record(ctx, tx, m.by(), change.Entry{
			Event:        "apps.publisher.registered",
			Action:       iam.PublisherWrite,
			ResourceType: resourcePublisher,
			ResourceID:   p.KeyID + "/" + p.OrgSlug,
			Version:      p.ResourceVersion,
			OrgID:        orgID,
			Data:         data,
			After:        data,
		})
	})
}

// delegatedOrg returns the id of the org that a delegation names; empty for the platform.
func delegatedOrg(ctx context.Context, tx db.Tx, slug string) (string, error) {
	if slug == "" {
		return "", nil
	}
	org, err := iam.GetOrgBySlug(ctx, tx, slug)
	if fault.Is(err, fault.NotFound) {
		return "", fault.New(fault.Unprocessable, codeOrgUnknown, "The delegation names an org that does not exist.", nil).
			WithField("/delegation/payload/org_slug", "is no org's slug").Permanent()
	}
	return org.ID, err
}
