package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// ReleaseAppSlug gives back an app slug under which nothing was published. The next org that asks may have it.
func (s *Service) ReleaseAppSlug(ctx context.Context, m Meta, orgID, slug string) error {
	check := access.Org(m.Principal, iam.ArtifactManage, orgID)
	return do(ctx, s, check, func(tx db.Tx, org iam.Org) error {
		app, err := catalog.GetApp(ctx, tx, slug)
		if err == nil && app.OrgID != org.ID {
			err = iam.ErrNotFound()
		}
		if err == nil {
			err = checkUnpublished(ctx, tx, m, app)
		}
		if err == nil {
			err = catalog.Release(ctx, tx, slug)
		}
		if err != nil {
			return err
		}
		return m.recordAppSlug(ctx, tx, "apps.slug.released", iam.ArtifactManage, app, app.ResourceVersion+1, nil)
	})
}

// TransferAppSlug gives such a slug to another org, or to the platform. An empty org is the platform.
func (s *Service) TransferAppSlug(ctx context.Context, m Meta, slug, orgID string) (catalog.Slug, error) {
	check := access.Platform(m.Principal, iam.CatalogManage)
	return run(ctx, s, check, func(tx db.Tx, _ access.Nothing) (catalog.Slug, error) {
		return m.transferAppSlug(ctx, tx, slug, orgID)
	})
}

func (m Meta) transferAppSlug(ctx context.Context, tx db.Tx, slug, orgID string) (catalog.Slug, error) {
	if orgID != "" {
		_, err := iam.GetOrg(ctx, tx, orgID)
		if fault.Is(err, fault.NotFound) {
			err = fault.New(fault.Unprocessable, codeOrgUnknown, "There is no such org.", err).
				WithField("/org_id", "names no org").Permanent()
		}
		if err != nil {
			return catalog.Slug{}, err
		}
	}
	before, err := catalog.GetApp(ctx, tx, slug)
	if err != nil {
		return catalog.Slug{}, err
	}
	if before.OrgID == orgID {
		return catalog.GetSlug(ctx, tx, slug)
	}
	if err := checkUnpublished(ctx, tx, m, before); err != nil {
		return catalog.Slug{}, err
	}
	after, err := catalog.Transfer(ctx, tx, before, orgID, m.Now)
	if err != nil {
		return catalog.Slug{}, err
	}
	if err := m.recordAppSlug(ctx, tx, "apps.slug.transferred", iam.CatalogManage, before, after.ResourceVersion,
		map[string]any{"org_id": orgID}); err != nil {
		return catalog.Slug{}, err
	}
	return catalog.GetSlug(ctx, tx, slug)
}

// checkUnpublished refuses to part with a slug under which versions, artifacts or open intents exist.
func checkUnpublished(ctx context.Context, tx db.Tx, m Meta, app catalog.App) error {
	versions, err := catalog.HasVersions(ctx, tx, app.Slug)
	if err != nil {
		return err
	}
	used, err := artifact.InUse(ctx, tx, app.OrgID, app.Slug, m.Now)
	if err != nil {
		return err
	}
	if versions || used {
		return fault.New(fault.Conflict, codeAppSlugInUse, "Versions, artifacts or open publish intents exist under this "+
			"slug.", nil).Permanent()
	}
	return nil
}

func (m Meta) recordAppSlug(ctx context.Context, tx db.Tx, eventType, action string, before catalog.App, version int64,
	after any,
) error {
	return change.Record(ctx, tx, m.by(), change.Entry{
		Event:        eventType,
		Action:       action,
		ResourceType: resourceApp,
		ResourceID:   before.Slug,
		Version:      version,
		OrgID:        before.OrgID,
		Data:         map[string]any{"app_slug": before.Slug},
		Before:       map[string]any{"org_id": before.OrgID},
		After:        after,
	})
}
