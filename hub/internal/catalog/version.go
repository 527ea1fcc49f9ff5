package catalog

import (
	"bytes"
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// Registration is a verified manifest on its way into the catalogue.
type Registration struct {
	// ID is the new version's.
	ID       string
	Verified manifest.Verified
	Envelope *protocol.Envelope
	// Delegated tells a delegated publisher from a catalog key.
	Delegated bool
	// OrgID owns the app: that of the delegation's org slug; empty for apps of the platform.
	OrgID string
	Now   time.Time
}

// Register adds a version as draft. An app of which no version ever left draft takes its description from it; after
// that only a version that is published changes what the catalogue shows. A draft may be registered again with other
// content; whatever is further on never changes, because nodes and reviewers rely on it.
func Register(ctx context.Context, tx db.Tx, r Registration) (Version, error) {
	m := r.Verified.Manifest()
	if !r.Verified.OK() {
		return Version{}, fmt.Errorf("register %s: the manifest was not verified", m.App.Slug)
	}
	a, _, err := Reserve(ctx, tx, m.App.Slug, r.OrgID, r.Now)
	if err != nil {
		return Version{}, err
	}
	asJSON, err := m.JSON()
	if err != nil {
		return Version{}, err
	}
	envelope, err := proto.MarshalOptions{Deterministic: true}.Marshal(r.Envelope)
	if err != nil {
		return Version{}, fmt.Errorf("encode the manifest's envelope: %w", err)
	}
	digest := r.Verified.Digest()
	v := Version{
		ID: r.ID, AppSlug: a.Slug, Version: m.Version.Version, Status: Draft, Manifest: m, ManifestJSON: asJSON,
		ManifestEnvelope: envelope, ManifestSHA256: digest[:], PublisherKeyID: r.Verified.Publisher().KeyID,
		PublisherOrgSlug: r.Verified.Publisher().OrgSlug, Delegated: r.Delegated, ResourceVersion: 1, CreatedAt: r.Now,
		UpdatedAt: r.Now,
	}
	old, err := selectVersion(ctx, tx, v.AppSlug, v.Version)
	switch {
	case fault.Is(err, fault.NotFound):
		err = insertVersion(ctx, tx, v)
	case err != nil:
	case bytes.Equal(old.ManifestSHA256, v.ManifestSHA256) && old.PublisherKeyID == v.PublisherKeyID:
		return old, nil
	case old.Status != Draft:
		return Version{}, conflict(CodeVersionExists, "This version has left draft with other content; choose a new "+
			"version.").
			WithField("/version/version", "exists with other content")
	default:
		v.ID, v.CreatedAt, v.ResourceVersion = old.ID, old.CreatedAt, old.ResourceVersion+1
		err = updateVersion(ctx, tx, v)
	}
	if err != nil {
		return Version{}, err
	}
	return v, describeNewApp(ctx, tx, m.App, r.Now)
}

// GetVersion returns one version.
func GetVersion(ctx context.Context, tx db.Tx, slug, version string) (Version, error) {
	return selectVersion(ctx, tx, slug, version)
}

// EachManifest gives the signed envelope of every version that is not retired. The bytes are valid during the call.
func EachManifest(ctx context.Context, tx db.Tx, each func(envelope []byte)) error {
	return eachManifest(ctx, tx, each)
}

// VersionFilter says which versions a listing shows.
type VersionFilter struct {
	AppSlug string
	// Drafts shows those that are not out yet as well: for the owner and for admins.
	Drafts bool
	// After is the id of the last version of the page before.
	After string
	Limit int
}

// Versions lists an app's versions, newest first.
func Versions(ctx context.Context, tx db.Tx, f VersionFilter) ([]Version, error) {
	if f.After != "" && !db.IsID(f.After) {
		return nil, cursorInvalid()
	}
	return selectVersions(ctx, tx, f)
}

// SetStatus moves a version. The caller has made sure that what an active version refers to is active and verified.
func SetStatus(ctx context.Context, tx db.Tx, slug, version string, status Status,
	now time.Time,
) (before, after Version, err error) {
	before, err = selectVersion(ctx, tx, slug, version)
	if err != nil {
		return Version{}, Version{}, err
	}
	if err := before.Status.mayBecome(status); err != nil {
		return Version{}, Version{}, err
	}
	after = before
	after.Status, after.UpdatedAt, after.ResourceVersion = status, now, before.ResourceVersion+1
	if status == Active {
		after.PublishedAt = now
	}
	if err := updateVersion(ctx, tx, after); err != nil || status != Active {
		return before, after, err
	}
	return before, after, describeApp(ctx, tx, after.Manifest.App, now)
}
