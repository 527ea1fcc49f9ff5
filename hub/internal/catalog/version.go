package catalog

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// Registration is a verified manifest that Register adds to the catalogue.
type Registration struct {
	// ID is the new version's.
	ID       string
	Verified manifest.Verified
	Envelope *protocol.Envelope
	// Delegated is true for a delegated publisher, false for a catalog key.
	Delegated bool
	// OrgID owns the app: that of the delegation's org slug; empty for apps of the platform.
	OrgID string
	Now   time.Time
}

// Register adds a version as draft, or replaces the content of a draft. Content beyond draft never changes, because
// nodes and reviewers rely on it. The version describes the app while no version of it was published; later only
// publishing one changes what the catalogue shows.
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
	old, err := GetVersion(ctx, tx, v.AppSlug, v.Version)
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
	return v, describe(ctx, tx, m.App, r.Now,
		`WHERE slug = $1 AND NOT EXISTS (SELECT 1 FROM app_versions v WHERE v.app_slug = $1 AND v.published_at IS NOT NULL)`)
}

func insertVersion(ctx context.Context, tx db.Tx, v Version) error {
	_, err := tx.Exec(ctx, `
		INSERT INTO app_versions (app_slug, version, id, status, manifest, manifest_envelope, manifest_sha256,
		publisher_key_id, publisher_org_slug,
		                          published_at, resource_version, created_at, updated_at, canary_percent)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)`,
		v.AppSlug, v.Version, v.ID, v.Status, json.RawMessage(v.ManifestJSON), v.ManifestEnvelope, v.ManifestSHA256,
		v.PublisherKeyID, delegatedBy(v), db.OrNull(v.PublishedAt), v.ResourceVersion, v.CreatedAt, v.UpdatedAt,
		v.CanaryPercent)
	return err
}

func updateVersion(ctx context.Context, tx db.Tx, v Version) error {
	_, err := tx.Exec(ctx, `
		UPDATE app_versions SET status = $3, manifest = $4, manifest_envelope = $5, manifest_sha256 = $6, publisher_key_id =
		$7,
		       publisher_org_slug = $8, published_at = $9, resource_version = $10, updated_at = $11, canary_percent = $12
		WHERE app_slug = $1 AND version = $2`,
		v.AppSlug, v.Version, v.Status, json.RawMessage(v.ManifestJSON), v.ManifestEnvelope, v.ManifestSHA256,
		v.PublisherKeyID, delegatedBy(v), db.OrNull(v.PublishedAt), v.ResourceVersion, v.UpdatedAt, v.CanaryPercent)
	return err
}

func delegatedBy(v Version) *string {
	if !v.Delegated {
		return nil
	}
	return &v.PublisherOrgSlug
}

const versionColumns = `app_slug, version, id, status, manifest, manifest_envelope, manifest_sha256, publisher_key_id,
	publisher_org_slug,
	published_at, resource_version, created_at, updated_at, canary_percent`

func scanVersion(row pgx.CollectableRow) (Version, error) {
	var (
		v       Version
		orgSlug *string
	)
	err := row.Scan(&v.AppSlug, &v.Version, &v.ID, &v.Status, &v.ManifestJSON, &v.ManifestEnvelope, &v.ManifestSHA256,
		&v.PublisherKeyID, &orgSlug, (*zeronull.Timestamptz)(&v.PublishedAt), &v.ResourceVersion, &v.CreatedAt, &v.UpdatedAt,
		&v.CanaryPercent)
	if err != nil {
		return Version{}, err
	}
	if orgSlug != nil {
		v.PublisherOrgSlug, v.Delegated = *orgSlug, true
	}
	v.Manifest, err = manifest.FromJSON(v.ManifestJSON)
	return v, err
}

// GetVersion returns one version.
func GetVersion(ctx context.Context, tx db.Tx, slug, version string) (Version, error) {
	v, err := db.SelectOne(ctx, tx, scanVersion, `SELECT `+versionColumns+
		` FROM app_versions WHERE app_slug = $1 AND version = $2`, slug, version)
	return v, orNotFound(err)
}

// EachManifest calls each with the name and the signed envelope of every version that is not retired. The bytes are
// valid during the call.
func EachManifest(ctx context.Context, tx db.Tx, each func(version string, envelope []byte)) error {
	var (
		version  string
		envelope []byte
	)
	return db.ForEach(ctx, tx, []any{&version, &envelope}, func() { each(version, envelope) },
		`SELECT version, manifest_envelope FROM app_versions WHERE status <> 'retired'`)
}

// EachManifestOffered calls each with the signed envelopes of the versions of a name, of any app, that are active or on
// the way there. The bytes are valid during the call.
func EachManifestOffered(ctx context.Context, tx db.Tx, version string, each func(envelope []byte)) error {
	var envelope []byte
	return db.ForEach(ctx, tx, []any{&envelope}, func() { each(envelope) }, `SELECT manifest_envelope FROM app_versions
		WHERE version = $1 AND status IN ('staged', 'canary', 'active')`, version)
}

// VersionFilter says which versions a listing shows.
type VersionFilter struct {
	AppSlug string
	// Unreleased shows drafts and staged versions as well: for the owner and for admins.
	Unreleased bool
	// After is the id of the last version of the page before.
	After string
	Limit int
}

// Versions lists an app's versions, newest first.
func Versions(ctx context.Context, tx db.Tx, f VersionFilter) ([]Version, error) {
	if f.After != "" && !db.IsID(f.After) {
		return nil, fault.CursorInvalid()
	}
	return db.Select(ctx, tx, scanVersion, `
		SELECT `+versionColumns+` FROM app_versions
		WHERE app_slug = $1 AND ($2 OR status NOT IN ('draft', 'staged')) AND ($3::UUID IS NULL OR id < $3::UUID)
		ORDER BY id DESC LIMIT $4`, f.AppSlug, f.Unreleased, db.OrNull(f.After), pageOf(f.Limit))
}

// Move is a change of a version's status.
type Move struct {
	To Status
	// CanaryPercent is the share of projects that may launch a canary, between 1 and 100; 0 for every other status.
	CanaryPercent int
}

// SetStatus moves a version to a status. The caller has checked that the images of what can be launched are active and
// verified, and that no app instance has what is retired.
func SetStatus(ctx context.Context, tx db.Tx, slug, version string, move Move,
	now time.Time,
) (before, after Version, err error) {
	before, err = GetVersion(ctx, tx, slug, version)
	if err != nil {
		return Version{}, Version{}, err
	}
	if err := before.Status.mayBecome(move.To); err != nil {
		return Version{}, Version{}, err
	}
	after = before
	after.Status, after.CanaryPercent = move.To, move.CanaryPercent
	after.UpdatedAt, after.ResourceVersion = now, before.ResourceVersion+1
	if move.To == Active {
		after.PublishedAt = now
	}
	if err := updateVersion(ctx, tx, after); err != nil || move.To != Active {
		return before, after, err
	}
	return before, after, describe(ctx, tx, after.Manifest.App, now, `WHERE slug = $1`)
}
