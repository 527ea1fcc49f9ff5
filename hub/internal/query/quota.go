package query

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// OrgQuota is what an org may hold and what it holds.
type OrgQuota struct {
	Org          iam.Org
	Limits, Used iam.Limits
}

// OrgQuota reads an org's quota.
func (s *Service) OrgQuota(ctx context.Context, p iam.Principal, orgID string, now time.Time) (OrgQuota, error) {
	out, err := db.ReadTx(ctx, s.DB, func(tx db.Tx) (out OrgQuota, err error) {
		if out.Org, err = orgFor(ctx, tx, p, iam.QuotaRead, orgID); err != nil {
			return OrgQuota{}, err
		}
		if out.Limits, err = iam.LimitsOf(ctx, tx, out.Org.ID); err != nil {
			return OrgQuota{}, err
		}
		out.Used, err = command.QuotaUsage(ctx, tx, out.Org.ID, now)
		return out, err
	})
	if err == nil && s.Registry != nil {
		out.Used[iam.QuotaRegistryBytes] = s.Registry.UsedBytes(out.Org.Slug)
	}
	return out, err
}

// AppSlugs lists the app slugs that belong to an org.
func (s *Service) AppSlugs(ctx context.Context, p iam.Principal, orgID, after string,
	limit int,
) ([]catalog.Slug, error) {
	return db.ReadTx(ctx, s.DB, func(tx db.Tx) ([]catalog.Slug, error) {
		org, err := orgFor(ctx, tx, p, iam.ArtifactRead, orgID)
		if err != nil {
			return nil, err
		}
		return catalog.Slugs(ctx, tx, org.ID, after, limit)
	})
}
