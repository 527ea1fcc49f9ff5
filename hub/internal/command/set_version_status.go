package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// VersionMove names a version of an app, and why its status changes.
type VersionMove struct {
	AppSlug, Version string
	Reason           string
}

// PublishAppVersion makes a version launchable: its images must be registered and verified, and become active with it.
func (s *Service) PublishAppVersion(ctx context.Context, m Meta, v VersionMove) (catalog.Version, error) {
	return s.setVersionStatus(ctx, m, v, catalog.Move{To: catalog.Active}, "apps.version.published")
}

// PromoteAppVersion makes a version staged or a canary: some may launch it before all. Its images must be registered
// and verified. canaryPercent is the share of projects that may launch a canary; 0 for a staged version.
func (s *Service) PromoteAppVersion(ctx context.Context, m Meta, v VersionMove, to catalog.Status,
	canaryPercent int,
) (catalog.Version, error) {
	wrong := fault.New(fault.Unprocessable, fault.CodeInvalid, "A canary needs the share of projects that may launch it, "+
		"and nothing else has one.", nil)
	switch {
	case to != catalog.Staged && to != catalog.Canary:
		return catalog.Version{}, wrong.WithField("/status", "is neither staged nor canary").Permanent()
	case to == catalog.Canary && (canaryPercent < 1 || canaryPercent > 100):
		return catalog.Version{}, wrong.WithField("/canary_percent", "must be between 1 and 100").Permanent()
	case to == catalog.Staged && canaryPercent != 0:
		return catalog.Version{}, wrong.WithField("/canary_percent", "belongs to a canary").Permanent()
	}
	return s.setVersionStatus(ctx, m, v, catalog.Move{To: to, CanaryPercent: canaryPercent}, "apps.version.promoted")
}

// DeprecateAppVersion closes a version for new instances; those that run go on.
func (s *Service) DeprecateAppVersion(ctx context.Context, m Meta, v VersionMove) (catalog.Version, error) {
	return s.setVersionStatus(ctx, m, v, catalog.Move{To: catalog.Deprecated}, "apps.version.deprecated")
}

// RetireAppVersion ends a version that no app instance has, so that the registry does not keep its images for it.
func (s *Service) RetireAppVersion(ctx context.Context, m Meta, v VersionMove) (catalog.Version, error) {
	return s.setVersionStatus(ctx, m, v, catalog.Move{To: catalog.Retired}, "apps.version.retired")
}

// setVersionStatus moves a version to a status. The images of what can be launched become active with it.
func (s *Service) setVersionStatus(ctx context.Context, m Meta, v VersionMove, move catalog.Move,
	eventType string,
) (catalog.Version, error) {
	check := access.Platform(m.Principal, iam.CatalogManage)
	return once(ctx, s, m, check, func(tx db.Tx, _ access.Nothing) (catalog.Version, error) {
		app, err := catalog.GetApp(ctx, tx, v.AppSlug)
		if err != nil {
			return catalog.Version{}, err
		}
		before, after, err := catalog.SetStatus(ctx, tx, v.AppSlug, v.Version, move, m.Now)
		if err != nil {
			return catalog.Version{}, err
		}
		switch move.To {
		case catalog.Staged, catalog.Canary, catalog.Active:
			err = m.activateImages(ctx, tx, after)
		case catalog.Retired:
			err = checkVersionUnused(ctx, tx, after)
		case catalog.Draft, catalog.Deprecated:
		}
		if err != nil {
			return catalog.Version{}, err
		}
		return after, m.recordVersion(ctx, tx, eventType, v.Reason, app.OrgID, &before, after)
	})
}

// checkVersionUnused refuses a version that app instances run or may start with.
func checkVersionUnused(ctx context.Context, tx db.Tx, v catalog.Version) error {
	used, err := instance.VersionInUse(ctx, tx, v.AppSlug, v.Version)
	if err == nil && used {
		err = fault.New(fault.Conflict, codeAppVersionInUse, "App instances have the version; retire it once they are "+
			"upgraded or decommissioned.", nil).Permanent()
	}
	return err
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
