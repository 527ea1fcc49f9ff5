package httpapi

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// GetOrgQuota tells what an org may hold, and what it holds.
func (s *Server) GetOrgQuota(ctx context.Context, r GetOrgQuotaRequestObject) (GetOrgQuotaResponseObject, error) {
	quota, err := s.orgQuota(ctx, r.OrgID)
	return GetOrgQuota200JSONResponse(quota), err
}

// PutOrgQuota sets what an org may hold.
func (s *Server) PutOrgQuota(ctx context.Context, r PutOrgQuotaRequestObject) (PutOrgQuotaResponseObject, error) {
	set := iam.Limits{}
	for _, l := range r.Body.Limits {
		set[iam.Quota(l.Name)] = l.Limit
	}
	if _, err := s.Commands.PutOrgQuota(ctx, metaFrom(ctx), r.OrgID, set); err != nil {
		return nil, err
	}
	quota, err := s.orgQuota(ctx, r.OrgID)
	return PutOrgQuota200JSONResponse(quota), err
}

func (s *Server) orgQuota(ctx context.Context, orgID string) (OrgQuota, error) {
	quota, err := s.Queries.OrgQuota(ctx, principalOf(ctx), orgID, metaFrom(ctx).Now)
	if err != nil {
		return OrgQuota{}, err
	}
	out := OrgQuota{OrgID: orgID, Items: []OrgQuotaItem{}}
	defaults := iam.DefaultLimits()
	for _, name := range iam.QuotaNames() {
		out.Items = append(out.Items, OrgQuotaItem{
			Name: QuotaName(name), Limit: quota.Limits[name], Used: quota.Used[name],
			DefaultLimit: defaults[name],
		})
	}
	return out, nil
}

// ListAppSlugs lists the app slugs that belong to an org.
func (s *Server) ListAppSlugs(ctx context.Context, r ListAppSlugsRequestObject) (ListAppSlugsResponseObject, error) {
	items, next, err := page(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]catalog.Slug, error) {
		return s.Queries.AppSlugs(ctx, principalOf(ctx), r.OrgID, p)
	}, func(v catalog.Slug) string { return v.Slug })
	return ListAppSlugs200JSONResponse{Items: views(items, slugView), NextCursor: next}, err
}

// ReleaseAppSlug gives back a slug under which nothing was published.
func (s *Server) ReleaseAppSlug(ctx context.Context,
	r ReleaseAppSlugRequestObject,
) (ReleaseAppSlugResponseObject, error) {
	return ReleaseAppSlug204Response{}, s.Commands.ReleaseAppSlug(ctx, metaFrom(ctx), r.OrgID, r.AppSlug)
}

// TransferAppSlug gives a slug to another org, or to the platform.
func (s *Server) TransferAppSlug(ctx context.Context,
	r TransferAppSlugRequestObject,
) (TransferAppSlugResponseObject, error) {
	slug, err := s.Commands.TransferAppSlug(ctx, metaFrom(ctx), r.AppSlug, r.Body.OrgID)
	return TransferAppSlug200JSONResponse(slugView(slug)), err
}

func slugView(s catalog.Slug) OwnedSlug {
	return OwnedSlug{Slug: s.Slug, OrgID: s.OrgID, Published: s.Published, CreatedAt: s.CreatedAt}
}
