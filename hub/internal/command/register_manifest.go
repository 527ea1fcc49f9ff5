package command

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

const manifestPointer = "/manifest_envelope"

// RegisterManifest takes a publisher-signed manifest into the catalogue, as draft. It checks who signed and what, and
// keeps the very envelope: nodes check it again.
func (s *Service) RegisterManifest(ctx context.Context, m Meta, envelope *protocol.Envelope) (catalog.Version, error) {
	bundle, id := s.Bundle(), db.NewID()
	check := access.Platform(m.Principal, iam.CatalogManage)
	return once(ctx, s, m, check, func(tx db.Tx, _ access.Nothing) (catalog.Version, error) {
		verified, delegated, err := verifyManifest(ctx, tx, envelope, bundle, m)
		if err != nil {
			return catalog.Version{}, err
		}
		orgID, err := ownerOf(ctx, tx, verified)
		if err != nil {
			return catalog.Version{}, err
		}
		v, err := catalog.Register(ctx, tx, catalog.Registration{
			ID:        id,
			Verified:  verified,
			Envelope:  envelope,
			Delegated: delegated,
			OrgID:     orgID,
			Now:       m.Now,
		})
		if err != nil {
			return catalog.Version{}, err
		}
		return v, m.recordVersion(ctx, tx, "apps.version.registered", "", orgID, nil, v)
	})
}

// verifyManifest tries the delegations of the keys that signed; a catalog key may sign without one.
func verifyManifest(ctx context.Context, tx db.Tx, env *protocol.Envelope, b protocol.Bundle,
	m Meta,
) (v manifest.Verified, delegated bool, err error) {
	v, refusal := manifest.Verify(env, nil, b, m.Now)
	if refusal == nil {
		return v, false, nil
	}
	for _, sig := range env.GetSignatures() {
		publishers, err := catalog.PublishersWithKey(ctx, tx, sig.GetKeyId())
		if err != nil {
			return manifest.Verified{}, false, err
		}
		for _, p := range publishers {
			delegation := &protocol.Envelope{}
			if err := proto.Unmarshal(p.DelegationEnvelope, delegation); err != nil {
				return manifest.Verified{}, false, fmt.Errorf("decode the delegation of %s: %w", p.KeyID, err)
			}
			v, err := manifest.Verify(env, delegation, b, m.Now)
			if err == nil {
				return v, true, nil
			}
			// A fault speaks of the document and is more use than the refusal of a signature.
			if errors.As(err, new(*fault.Error)) || !errors.As(refusal, new(*fault.Error)) {
				refusal = err
			}
		}
	}
	return manifest.Verified{}, false, refusedDocument(refusal, codeManifestRefused, manifestPointer)
}

// ownerOf finds the org in whose repositories all images of the manifest lie; empty for an app of the platform.
func ownerOf(ctx context.Context, tx db.Tx, v manifest.Verified) (orgID string, err error) {
	owner := ""
	images := v.Manifest().Images()
	for i, image := range images {
		slug, ok := artifact.OrgSlugOf(manifest.RepositoryOf(image.Ref))
		if !ok || i > 0 && slug != owner {
			return "", fault.New(fault.Unprocessable, manifest.CodeInvalid, "All images of a manifest belong to one owner.",
				nil).
				WithField(manifestPointer+"/payload"+image.Pointer, "has another owner than the first").Permanent()
		}
		owner = slug
	}
	if owner == "" {
		return "", nil
	}
	org, err := iam.GetOrgBySlug(ctx, tx, owner)
	if fault.Is(err, fault.NotFound) {
		return "", fault.New(fault.Unprocessable, codeOrgUnknown, "The images lie in the repositories of an org that does "+
			"not exist.", nil).
			WithField(manifestPointer+"/payload"+images[0].Pointer, "names no org").Permanent()
	}
	return org.ID, err
}
