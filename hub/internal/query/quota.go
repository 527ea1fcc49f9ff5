package query

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/quota"
)

// OrgQuota is what an org may hold and what it holds.
type OrgQuota struct {
	Org          iam.Org
	Limits, Used iam.Limits
}

// OrgQuota reads an org's quota.
func (s *Service) OrgQuota(ctx context.Context, p iam.Principal, orgID string, now time.Time) (OrgQuota, error) {
	out, err := read(ctx, s, access.Org(p, iam.QuotaRead, orgID), func(tx db.Tx, org iam.Org) (OrgQuota, error) {
		limits, err := iam.LimitsOf(ctx, tx, org.ID)
		if err != nil {
			return OrgQuota{}, err
		}
		used, err := quota.Usage(ctx, tx, org.ID, now)
		return OrgQuota{org, limits, used}, err
	})
	if err == nil && s.Registry != nil {
		out.Used[iam.QuotaRegistryBytes] = s.Registry.UsedBytes(out.Org.Slug)
	}
	return out, err
}

// AppSlugs lists the app slugs that belong to an org.
func (s *Service) AppSlugs(ctx context.Context, p iam.Principal, orgID string,
	page db.Page,
) ([]catalog.Slug, error) {
	return listIn(ctx, s, access.Org(p, iam.ArtifactRead, orgID), catalog.Slugs, orgID, page)
}
