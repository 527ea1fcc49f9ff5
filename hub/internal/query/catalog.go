package query

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// AppVersion is a version with its artifacts.
type AppVersion struct {
	catalog.Version
	Artifacts []artifact.Artifact
}

// Apps lists the catalogue as the caller sees it, or, with a project, what the project may launch.
func (s *Service) Apps(ctx context.Context, p iam.Principal, projectID string, page db.Page) ([]catalog.App, error) {
	f := catalog.AppFilter{OrgID: p.OrgID, All: p.PlatformAdmin, After: page.After, Limit: page.Limit}
	if projectID == "" {
		check := access.Platform(p, iam.CatalogRead)
		return read(ctx, s, check, func(tx db.Tx, _ access.Nothing) ([]catalog.App, error) {
			return catalog.Apps(ctx, tx, f)
		})
	}
	check := access.Project(p, iam.EntitlementRead, projectID)
	return read(ctx, s, check, func(tx db.Tx, project iam.Project) ([]catalog.App, error) {
		f.OrgID, f.All, f.ProjectID = project.OrgID, false, project.ID
		return catalog.Apps(ctx, tx, f)
	})
}

// AppVersions lists an app's versions, the newest first; drafts and staged ones only to the owner and platform admins.
func (s *Service) AppVersions(ctx context.Context, p iam.Principal, slug string,
	page db.Page,
) ([]AppVersion, error) {
	return read(ctx, s, access.Platform(p, iam.CatalogRead), func(tx db.Tx, _ access.Nothing) ([]AppVersion, error) {
		app, err := catalog.GetApp(ctx, tx, slug)
		if err != nil {
			return nil, err
		}
		if !p.PlatformAdmin && !app.VisibleTo(p.OrgID) {
			return nil, iam.ErrNotFound()
		}
		versions, err := catalog.Versions(ctx, tx, catalog.VersionFilter{
			AppSlug:    app.Slug,
			Unreleased: seesUnreleased(p, app),
			After:      page.After,
			Limit:      page.Limit,
		})
		if err != nil {
			return nil, err
		}
		return withArtifacts(ctx, tx, app.Slug, versions)
	})
}

// WithArtifacts adds the artifacts to a version that the caller of a command was given.
func (s *Service) WithArtifacts(ctx context.Context, v catalog.Version) (AppVersion, error) {
	return db.ReadTx(ctx, s.DB, func(tx db.Tx) (AppVersion, error) {
		full, err := withArtifacts(ctx, tx, v.AppSlug, []catalog.Version{v})
		if err != nil {
			return AppVersion{}, err
		}
		return full[0], nil
	})
}

func withArtifacts(ctx context.Context, tx db.Tx, slug string, versions []catalog.Version) ([]AppVersion, error) {
	names := make([]string, len(versions))
	for i, v := range versions {
		names[i] = v.Version
	}
	artifacts, err := artifact.OfVersions(ctx, tx, slug, names)
	out := make([]AppVersion, len(versions))
	for i, v := range versions {
		out[i] = AppVersion{v, artifacts[v.Version]}
	}
	return out, err
}

// seesUnreleased reports whether a caller may know of an app's drafts and staged versions: its owner may, and platform
// admins.
func seesUnreleased(p iam.Principal, app catalog.App) bool {
	return p.PlatformAdmin || app.OrgID == p.OrgID && app.OrgID != ""
}

// Publishers lists delegations.
func (s *Service) Publishers(ctx context.Context, p iam.Principal, page db.Page) ([]catalog.Publisher, error) {
	return list(ctx, s, access.Platform(p, iam.PublisherRead), catalog.Publishers, page)
}

// Entitlements lists what a project may launch.
func (s *Service) Entitlements(ctx context.Context, p iam.Principal, projectID string,
	page db.Page,
) ([]catalog.Entitlement, error) {
	return listIn(ctx, s, access.Project(p, iam.EntitlementRead, projectID), catalog.Entitlements, projectID, page)
}

// Entitlement reads a project's entitlement to one app.
func (s *Service) Entitlement(ctx context.Context, p iam.Principal, projectID,
	slug string,
) (catalog.Entitlement, error) {
	return read(ctx, s, access.Project(p, iam.EntitlementRead, projectID),
		func(tx db.Tx, project iam.Project) (catalog.Entitlement, error) {
			return catalog.GetEntitlement(ctx, tx, project.ID, slug)
		})
}

// RegistryHost returns where images are pushed and pulled.
func (s *Service) RegistryHost(p iam.Principal) (string, error) {
	if err := iam.Authorize(p, iam.CatalogRead, "", ""); err != nil {
		return "", err
	}
	return s.Registry.Host(), nil
}

// Artifacts lists a project's artifacts.
func (s *Service) Artifacts(ctx context.Context, p iam.Principal, f artifact.Filter) ([]artifact.Artifact, error) {
	return list(ctx, s, access.Project(p, iam.ArtifactRead, f.ProjectID), artifact.List, f)
}

// Artifact reads one of them.
func (s *Service) Artifact(ctx context.Context, p iam.Principal, projectID, id string,
	w Watch,
) (artifact.Artifact, error) {
	return await(ctx, s, id, w, func() (artifact.Artifact, int64, error) {
		a, err := read(ctx, s, access.Project(p, iam.ArtifactRead, projectID),
			func(tx db.Tx, project iam.Project) (artifact.Artifact, error) {
				return artifact.Get(ctx, tx, project.ID, id)
			})
		return a, a.ResourceVersion, err
	})
}
