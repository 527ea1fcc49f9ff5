package httpapi

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"

	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/query"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// ListApps lists the catalogue, or what one project may launch.
func (s *Server) ListApps(ctx context.Context, r ListAppsRequestObject) (ListAppsResponseObject, error) {
	items, next, err := page(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]catalog.App, error) {
		return s.Queries.Apps(ctx, principalOf(ctx), r.Params.ProjectID, p)
	}, func(v catalog.App) string { return v.Slug })
	return ListApps200JSONResponse{Items: views(items, appView), NextCursor: next}, err
}

func appView(a catalog.App) App {
	return App{
		Slug: a.Slug, DisplayName: a.DisplayName, Description: a.Description, Category: a.Category,
		RuntimeBackend: RuntimeBackend(a.RuntimeBackend), LatestVersion: a.LatestVersion,
	}
}

// ListAppVersions lists an app's versions, newest first; drafts only to the owner and to platform admins.
func (s *Server) ListAppVersions(ctx context.Context,
	r ListAppVersionsRequestObject,
) (ListAppVersionsResponseObject, error) {
	items, next, err := page(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]query.AppVersion, error) {
		return s.Queries.AppVersions(ctx, principalOf(ctx), r.AppSlug, p)
	}, func(v query.AppVersion) string { return v.ID })
	if err != nil {
		return nil, err
	}
	out, err := decodedViews(items, versionView)
	return ListAppVersions200JSONResponse{Items: out, NextCursor: next}, err
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
	out, err := s.version(ctx, v, err)
	return RegisterManifest201JSONResponse(out), err
}

// PublishAppVersion makes a version launchable.
func (s *Server) PublishAppVersion(ctx context.Context,
	r PublishAppVersionRequestObject,
) (PublishAppVersionResponseObject, error) {
	v, err := s.Commands.PublishAppVersion(ctx, metaFrom(ctx), versionMove(r.AppSlug, r.Version, r.Body))
	out, err := s.version(ctx, v, err)
	return PublishAppVersion200JSONResponse(out), err
}

// DeprecateAppVersion closes a version for new instances.
func (s *Server) DeprecateAppVersion(ctx context.Context,
	r DeprecateAppVersionRequestObject,
) (DeprecateAppVersionResponseObject, error) {
	v, err := s.Commands.DeprecateAppVersion(ctx, metaFrom(ctx), versionMove(r.AppSlug, r.Version, r.Body))
	out, err := s.version(ctx, v, err)
	return DeprecateAppVersion200JSONResponse(out), err
}

// PromoteAppVersion lets some launch a version before all.
func (s *Server) PromoteAppVersion(ctx context.Context,
	r PromoteAppVersionRequestObject,
) (PromoteAppVersionResponseObject, error) {
	v, err := s.Commands.PromoteAppVersion(ctx, metaFrom(ctx), command.VersionMove{
		AppSlug: r.AppSlug, Version: r.Version, Reason: r.Body.Reason,
	}, catalog.Status(r.Body.Status), int(r.Body.CanaryPercent))
	out, err := s.version(ctx, v, err)
	return PromoteAppVersion200JSONResponse(out), err
}

// RetireAppVersion ends a version that no app instance has.
func (s *Server) RetireAppVersion(ctx context.Context,
	r RetireAppVersionRequestObject,
) (RetireAppVersionResponseObject, error) {
	v, err := s.Commands.RetireAppVersion(ctx, metaFrom(ctx), versionMove(r.AppSlug, r.Version, r.Body))
	out, err := s.version(ctx, v, err)
	return RetireAppVersion200JSONResponse(out), err
}

func versionMove(slug, version string, body *AppVersionMove) command.VersionMove {
	move := command.VersionMove{AppSlug: slug, Version: version}
	if body != nil {
		move.Reason = body.Reason
	}
	return move
}

// ListPublishers lists delegations.
func (s *Server) ListPublishers(ctx context.Context,
	r ListPublishersRequestObject,
) (ListPublishersResponseObject, error) {
	items, next, err := page(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]catalog.Publisher, error) {
		return s.Queries.Publishers(ctx, principalOf(ctx), p)
	}, catalog.Publisher.Cursor)
	return ListPublishers200JSONResponse{Items: s.publisherViews(ctx, items), NextCursor: next}, err
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

func (s *Server) publisherViews(ctx context.Context, items []catalog.Publisher) []Publisher {
	return views(items, func(p catalog.Publisher) Publisher { return s.publisherView(ctx, p) })
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
	items, next, err := page(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]catalog.Entitlement, error) {
		return s.Queries.Entitlements(ctx, principalOf(ctx), r.ProjectID, p)
	}, func(v catalog.Entitlement) string { return v.AppSlug })
	return ListEntitlements200JSONResponse{Items: views(items, entitlementView), NextCursor: next}, err
}

// GetEntitlement gives one entitlement.
func (s *Server) GetEntitlement(ctx context.Context,
	r GetEntitlementRequestObject,
) (GetEntitlementResponseObject, error) {
	e, err := s.Queries.Entitlement(ctx, principalOf(ctx), r.ProjectID, r.AppSlug)
	return GetEntitlement200JSONResponse(entitlementView(e)), err
}

// PutEntitlement grants, narrows or withdraws an app for a project.
func (s *Server) PutEntitlement(ctx context.Context,
	r PutEntitlementRequestObject,
) (PutEntitlementResponseObject, error) {
	o := r.Body.PolicyOverrides
	e, err := s.Commands.PutEntitlement(ctx, metaFrom(ctx), catalog.Entitlement{
		ProjectID: r.ProjectID, AppSlug: r.AppSlug, Enabled: r.Body.Enabled,
		Policy: catalog.Policy{
			AllowedOperatingModes:     named[string](o.AllowedOperatingModes),
			AllowedControlPlaneScopes: named[string](o.AllowedControlPlaneScopes),
			AllowedVersions:           named[string](o.AllowedVersions),
			MaxAccelerators:           int(o.MaxAccelerators),
		},
	})
	return PutEntitlement200JSONResponse(entitlementView(e)), err
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

// named converts names; none are nil.
func named[T, S ~string](in []S) []T {
	var out []T
	for _, v := range in {
		out = append(out, T(v))
	}
	return out
}

// version views the version that a command returned, with its artifacts.
func (s *Server) version(ctx context.Context, v catalog.Version, err error) (AppVersion, error) {
	if err != nil {
		return AppVersion{}, err
	}
	full, err := s.Queries.WithArtifacts(ctx, v)
	if err != nil {
		return AppVersion{}, err
	}
	return versionView(full)
}

func versionView(full query.AppVersion) (AppVersion, error) {
	v := full.Version
	out := AppVersion{
		AppSlug: v.AppSlug, Version: v.Version, Status: AppVersionStatus(v.Status), Artifacts: []Artifact{},
		Parameters:     map[string]any{},
		PublisherKeyID: v.PublisherKeyID, PublishedAt: v.PublishedAt, CreatedAt: v.CreatedAt,
		CanaryPercent: int32(v.CanaryPercent),
	}
	for _, a := range full.Artifacts {
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
		return fault.New(fault.Malformed, codeEnvelopeMalformed, "The envelope cannot be read.", cause).WithField(pointer+at,
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
