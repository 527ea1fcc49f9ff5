package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// PublishAppVersion makes a version launchable: its images must be registered and verified, and become active with it.
func (s *Service) PublishAppVersion(ctx context.Context, m Meta, slug, version string) (catalog.Version, error) {
	return s.setVersionStatus(ctx, m, slug, version, catalog.Active, "apps.version.published")
}

// DeprecateAppVersion closes a version for new instances; those that run go on.
func (s *Service) DeprecateAppVersion(ctx context.Context, m Meta, slug, version string) (catalog.Version, error) {
	return s.setVersionStatus(ctx, m, slug, version, catalog.Deprecated, "apps.version.deprecated")
}

// setVersionStatus moves a version to a status. The images of an active version become active with it.
func (s *Service) setVersionStatus(ctx context.Context, m Meta, slug, version string, status catalog.Status,
	eventType string,
) (catalog.Version, error) {
	check := access.Platform(m.Principal, iam.CatalogManage)
	return once(ctx, s, m, check, func(tx db.Tx, _ access.Nothing) (catalog.Version, error) {
		app, err := catalog.GetApp(ctx, tx, slug)
		if err != nil {
			return catalog.Version{}, err
		}
		before, after, err := catalog.SetStatus(ctx, tx, slug, version, status, m.Now)
		if err != nil {
			return catalog.Version{}, err
		}
		if status == catalog.Active {
			if err := m.activateImages(ctx, tx, after); err != nil {
				return catalog.Version{}, err
			}
		}
		return after, m.recordVersion(ctx, tx, eventType, iam.CatalogManage, app.OrgID, &before, after)
	})
}

// activateImages makes the artifacts of a version's images active.
func (m Meta) activateImages(ctx context.Context, tx db.Tx, v catalog.Version) error {
	promoted, err := artifact.Activate(ctx, tx, v.Version, v.Manifest.Images(), m.Now)
	if err != nil {
		return err
	}
	for _, p := range promoted {
		err := m.recordArtifact(ctx, tx, "apps.artifact.activated", iam.CatalogManage, "", &p.Before, p.After)
		if err != nil {
			return err
		}
	}
	return nil
}
