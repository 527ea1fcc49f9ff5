package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// PublishAppVersion makes a version launchable: its images must be registered and verified, and become active with it.
type PublishAppVersion struct {
	DB *db.DB
}

// Do publishes.
func (c *PublishAppVersion) Do(ctx context.Context, m Meta, slug, version string) (catalog.Version, error) {
	if err := iam.Authorize(m.Principal, iam.CatalogManage, "", ""); err != nil {
		return catalog.Version{}, err
	}
	return db.RunTx(ctx, c.DB, func(tx db.Tx) (catalog.Version, error) {
		return Idempotent(ctx, tx, m, func() (catalog.Version, error) {
			app, err := catalog.GetApp(ctx, tx, slug)
			if err != nil {
				return catalog.Version{}, err
			}
			before, after, err := catalog.SetStatus(ctx, tx, slug, version, catalog.Active, m.Now)
			if err != nil {
				return catalog.Version{}, err
			}
			var refs []string
			for _, variant := range after.Manifest.Version.RuntimeProfile.ImageVariants {
				refs = append(refs, variant.ImageRef)
			}
			promoted, err := artifact.Activate(ctx, tx, version, refs, m.Now)
			if err != nil {
				return catalog.Version{}, err
			}
			for _, p := range promoted {
				if err := m.recordArtifact(ctx, tx, "apps.artifact.activated", iam.CatalogManage, &p.Before, p.After); err != nil {
					return catalog.Version{}, err
				}
			}
			return after, m.recordVersion(ctx, tx, "apps.version.published", iam.CatalogManage, app.OrgID, &before, after)
		})
	})
}
