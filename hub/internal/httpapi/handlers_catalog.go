package httpapi

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// ListApps lists the catalogue, or what one project may launch.
func (s *Server) ListApps(ctx context.Context, r ListAppsRequestObject) (ListAppsResponseObject, error) {
	p, limit := principalOf(ctx), limitOf(r.Params.Limit)
	apps, err := db.ReadTx(ctx, s.Queries.DB, func(tx db.Tx) ([]catalog.App, error) {
		f := catalog.AppFilter{OrgID: p.OrgID, All: p.PlatformAdmin, After: r.Params.Cursor, Limit: limit + 1}
		if r.Params.ProjectID == "" {
			if err := iam.Authorize(p, iam.CatalogRead, "", ""); err != nil {
				return nil, err
			}
			return catalog.Apps(ctx, tx, f)
		}
		project, err := iam.InProject(ctx, tx, p, iam.EntitlementRead, r.Params.ProjectID)
		if err != nil {
			return nil, err
		}
		f.OrgID, f.All, f.ProjectID = project.OrgID, false, project.ID
		return catalog.Apps(ctx, tx, f)
	})
	if err != nil {
		return nil, err
	}
	out := AppList{Items: []App{}}
	for i, a := range apps {
		if i == limit {
			out.NextCursor = out.Items[limit-1].Slug
			break
		}
		out.Items = append(out.Items, App{
			Slug: a.Slug, DisplayName: a.DisplayName, Description: a.Description, Category: a.Category,
			RuntimeBackend: RuntimeBackend(a.RuntimeBackend), LatestVersion: a.LatestVersion,
		})
	}
	return ListApps200JSONResponse(out), nil
}

// ListAppVersions lists an app's versions, newest first; drafts only to the owner and to platform admins.
func (s *Server) ListAppVersions(ctx context.Context,
	r ListAppVersionsRequestObject,
) (ListAppVersionsResponseObject, error) {
	p, limit := principalOf(ctx), limitOf(r.Params.Limit)
	if err := iam.Authorize(p, iam.CatalogRead, "", ""); err != nil {
		return nil, err
	}
	list, err := db.ReadTx(ctx, s.Queries.DB, func(tx db.Tx) (AppVersionList, error) {
		app, err := catalog.GetApp(ctx, tx, r.AppSlug)
		if err != nil {
			return AppVersionList{}, err
		}
		if !p.PlatformAdmin && !app.VisibleTo(p.OrgID) {
			return AppVersionList{}, iam.ErrNotFound()
		}
		versions, err := catalog.Versions(ctx, tx, catalog.VersionFilter{
			AppSlug: app.Slug, Drafts: seesDrafts(p, app), After: r.Params.Cursor, Limit: limit + 1,
		})
		if err != nil {
			return AppVersionList{}, err
		}
		out := AppVersionList{Items: []AppVersion{}}
		for i, v := range versions {
			if i == limit {
				out.NextCursor = versions[limit-1].ID
				break
			}
			item, err := versionView(ctx, tx, v)
			if err != nil {
				return AppVersionList{}, err
			}
			out.Items = append(out.Items, item)
		}
		return out, nil
	})
	if err != nil {
		return nil, err
	}
	return ListAppVersions200JSONResponse(list), nil
}

// RegisterManifest takes a publisher-signed manifest as draft.
func (s *Server) RegisterManifest(ctx context.Context,
	r RegisterManifestRequestObject,
) (RegisterManifestResponseObject, error) {
	env, err := envelopeOf(r.Body.ManifestEnvelope, "/manifest_envelope")
	if err != nil {
		return nil, err
	}
	v, err := s.Commands.RegisterManifest(ctx, metaFrom(ctx), env)
	if err != nil {
		return nil, err
	}
	out, err := s.version(ctx, v)
	if err != nil {
		return nil, err
	}
	return RegisterManifest201JSONResponse(out), nil
}

// PublishAppVersion makes a version launchable.
func (s *Server) PublishAppVersion(ctx context.Context,
	r PublishAppVersionRequestObject,
) (PublishAppVersionResponseObject, error) {
	v, err := s.Commands.PublishAppVersion(ctx, metaFrom(ctx), r.AppSlug, r.Version)
	if err != nil {
		return nil, err
	}
	out, err := s.version(ctx, v)
	if err != nil {
		return nil, err
	}
	return PublishAppVersion200JSONResponse(out), nil
}

// DeprecateAppVersion closes a version for new instances.
func (s *Server) DeprecateAppVersion(ctx context.Context,
	r DeprecateAppVersionRequestObject,
) (DeprecateAppVersionResponseObject, error) {
	v, err := s.Commands.DeprecateAppVersion(ctx, metaFrom(ctx), r.AppSlug, r.Version)
	if err != nil {
		return nil, err
	}
	out, err := s.version(ctx, v)
	if err != nil {
		return nil, err
	}
	return DeprecateAppVersion200JSONResponse(out), nil
}

// ListPublishers lists delegations.
func (s *Server) ListPublishers(ctx context.Context,
	r ListPublishersRequestObject,
) (ListPublishersResponseObject, error) {
	if err := iam.Authorize(principalOf(ctx), iam.PublisherRead, "", ""); err != nil {
		return nil, err
	}
	limit := limitOf(r.Params.Limit)
	publishers, err := db.ReadTx(ctx, s.Queries.DB, func(tx db.Tx) ([]catalog.Publisher, error) {
		return catalog.Publishers(ctx, tx, r.Params.Cursor, limit+1)
	})
	if err != nil {
		return nil, err
	}
	out := PublisherList{Items: []Publisher{}}
	for i, p := range publishers {
		if i == limit {
			out.NextCursor = publishers[limit-1].Cursor()
			break
		}
		out.Items = append(out.Items, s.publisherView(ctx, p))
	}
	return ListPublishers200JSONResponse(out), nil
}

// RegisterPublisher takes a delegation.
func (s *Server) RegisterPublisher(ctx context.Context,
	r RegisterPublisherRequestObject,
) (RegisterPublisherResponseObject, error) {
	env, err := envelopeOf(r.Body.Delegation, "/delegation")
	if err != nil {
		return nil, err
	}
	p, err := s.Commands.RegisterPublisher(ctx, metaFrom(ctx), env)
	if err != nil {
		return nil, err
	}
	return RegisterPublisher201JSONResponse(s.publisherView(ctx, p)), nil
}

func (s *Server) publisherView(ctx context.Context, p catalog.Publisher) Publisher {
	status := PublisherStatusActive
	switch {
	case s.Commands.Bundle().Revoked(p.KeyID):
		status = PublisherStatusRevoked
	case p.Expired(metaFrom(ctx).Now):
		status = PublisherStatusExpired
	}
	return Publisher{
		KeyID: p.KeyID, OrgSlug: p.OrgSlug, RepositoryPrefixes: p.RepositoryPrefixes, IssuedAt: p.IssuedAt,
		ExpiresAt: p.ExpiresAt, Status: status,
	}
}

// ListEntitlements lists what a project may launch.
func (s *Server) ListEntitlements(ctx context.Context,
	r ListEntitlementsRequestObject,
) (ListEntitlementsResponseObject, error) {
	limit := limitOf(r.Params.Limit)
	entitlements, err := db.ReadTx(ctx, s.Queries.DB, func(tx db.Tx) ([]catalog.Entitlement, error) {
		project, err := iam.InProject(ctx, tx, principalOf(ctx), iam.EntitlementRead, r.ProjectID)
		if err != nil {
			return nil, err
		}
		return catalog.Entitlements(ctx, tx, project.ID, r.Params.Cursor, limit+1)
	})
	if err != nil {
		return nil, err
	}
	out := EntitlementList{Items: []Entitlement{}}
	for i, e := range entitlements {
		if i == limit {
			out.NextCursor = out.Items[limit-1].AppSlug
			break
		}
		out.Items = append(out.Items, entitlementView(e))
	}
	return ListEntitlements200JSONResponse(out), nil
}

// GetEntitlement gives one entitlement.
func (s *Server) GetEntitlement(ctx context.Context,
	r GetEntitlementRequestObject,
) (GetEntitlementResponseObject, error) {
	e, err := db.ReadTx(ctx, s.Queries.DB, func(tx db.Tx) (catalog.Entitlement, error) {
		project, err := iam.InProject(ctx, tx, principalOf(ctx), iam.EntitlementRead, r.ProjectID)
		if err != nil {
			return catalog.Entitlement{}, err
		}
		return catalog.GetEntitlement(ctx, tx, project.ID, r.AppSlug)
	})
	if err != nil {
		return nil, err
	}
	return GetEntitlement200JSONResponse(entitlementView(e)), nil
}

// PutEntitlement grants, narrows or withdraws an app for a project.
func (s *Server) PutEntitlement(ctx context.Context,
	r PutEntitlementRequestObject,
) (PutEntitlementResponseObject, error) {
	o := r.Body.PolicyOverrides
	e, err := s.Commands.PutEntitlement(ctx, metaFrom(ctx), command.PutEntitlementInput{
		ProjectID: r.ProjectID, AppSlug: r.AppSlug, Enabled: r.Body.Enabled,
		Policy: catalog.Policy{
			AllowedOperatingModes: texts(o.AllowedOperatingModes), AllowedControlPlaneScopes: texts(o.AllowedControlPlaneScopes),
			AllowedVersions: texts(o.AllowedVersions), MaxAccelerators: int(o.MaxAccelerators),
		},
	})
	if err != nil {
		return nil, err
	}
	return PutEntitlement200JSONResponse(entitlementView(e)), nil
}

func entitlementView(e catalog.Entitlement) Entitlement {
	return Entitlement{
		AppSlug: e.AppSlug, Enabled: e.Enabled, UpdatedAt: e.UpdatedAt, UpdatedBy: e.UpdatedBy,
		PolicyOverrides: PolicyOverrides{
			AllowedOperatingModes:     named[OperatingMode](e.Policy.AllowedOperatingModes),
			AllowedControlPlaneScopes: named[ControlPlaneScope](e.Policy.AllowedControlPlaneScopes),
			AllowedVersions:           e.Policy.AllowedVersions, MaxAccelerators: int32(e.Policy.MaxAccelerators),
		},
	}
}

func texts[T ~string](in []T) []string {
	var out []string
	for _, v := range in {
		out = append(out, string(v))
	}
	return out
}

func named[T ~string](in []string) []T {
	var out []T
	for _, v := range in {
		out = append(out, T(v))
	}
	return out
}

func (s *Server) version(ctx context.Context, v catalog.Version) (AppVersion, error) {
	return db.ReadTx(ctx, s.Queries.DB, func(tx db.Tx) (AppVersion, error) { return versionView(ctx, tx, v) })
}

func versionView(ctx context.Context, tx db.Tx, v catalog.Version) (AppVersion, error) {
	artifacts, err := artifact.OfVersion(ctx, tx, v.AppSlug, v.Version)
	if err != nil {
		return AppVersion{}, err
	}
	out := AppVersion{
		AppSlug: v.AppSlug, Version: v.Version, Status: AppVersionStatus(v.Status), Artifacts: []Artifact{},
		Parameters:     map[string]any{},
		PublisherKeyID: v.PublisherKeyID, PublishedAt: v.PublishedAt, CreatedAt: v.CreatedAt,
	}
	for _, a := range artifacts {
		out.Artifacts = append(out.Artifacts, artifactView(a))
	}
	if err := json.Unmarshal(v.ManifestJSON, &out.Manifest); err != nil {
		return AppVersion{}, fmt.Errorf("decode the manifest of %s %s: %w", v.AppSlug, v.Version, err)
	}
	if version, ok := out.Manifest["version"].(map[string]any); ok {
		if parameters, ok := version["parameters"].(map[string]any); ok {
			out.Parameters = parameters
		}
	}
	return out, nil
}

// envelopeOf reads the JSON form of a signed document. Nothing is verified yet.
func envelopeOf(in SignedEnvelope, pointer string) (*protocol.Envelope, error) {
	malformed := func(at string, cause error) error {
		return fault.New(fault.Malformed, "envelope_malformed", "The envelope cannot be read.", cause).WithField(pointer+at,
			"is not standard base64").Permanent()
	}
	payload, err := base64.StdEncoding.DecodeString(in.Payload)
	if err != nil {
		return nil, malformed("/payload", err)
	}
	env := &protocol.Envelope{PayloadType: in.PayloadType, Payload: payload}
	for i, s := range in.Signatures {
		sig, err := base64.StdEncoding.DecodeString(s.Sig)
		if err != nil {
			return nil, malformed(fmt.Sprintf("/signatures/%d/sig", i), err)
		}
		env.Signatures = append(env.Signatures, &protocol.Signature{KeyId: s.Keyid, Signature: sig})
	}
	return env, nil
}

// seesDrafts reports whether a caller may know of an app's versions that are not out yet: the owner and admins.
func seesDrafts(p iam.Principal, app catalog.App) bool {
	return p.PlatformAdmin || app.OrgID == p.OrgID && app.OrgID != ""
}
