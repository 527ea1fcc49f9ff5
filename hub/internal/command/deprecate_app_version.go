package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// DeprecateAppVersion closes a version for new instances; those that run go on.
type DeprecateAppVersion struct {
	DB *db.DB
}

// Do deprecates.
func (c *DeprecateAppVersion) Do(ctx context.Context, m Meta, slug, version string) (catalog.Version, error) {
	if err := iam.Authorize(m.Principal, iam.CatalogManage, "", ""); err != nil {
		return catalog.Version{}, err
	}
	return db.RunTx(ctx, c.DB, func(tx db.Tx) (catalog.Version, error) {
		return Idempotent(ctx, tx, m, func() (catalog.Version, error) {
			app, err := catalog.GetApp(ctx, tx, slug)
			if err != nil {
				return catalog.Version{}, err
			}
			before, after, err := catalog.SetStatus(ctx, tx, slug, version, catalog.Deprecated, m.Now)
			if err != nil {
				return catalog.Version{}, err
			}
			return after, m.recordVersion(ctx, tx, "apps.version.deprecated", iam.CatalogManage, app.OrgID, &before, after)
		})
	})
}
