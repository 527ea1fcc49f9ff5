package catalog

import (
	"context"
	"encoding/json"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/manifest"
)

func null(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

func nullTime(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

func timeOf(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return *t
}

func orNotFound(err error) error {
	if db.IsNoRows(err) {
		return notFound()
	}
	return err
}

// ---- apps

func insertApp(ctx context.Context, tx db.Tx, slug, orgID string, now time.Time) (bool, error) {
	tag, err := tx.Exec(ctx, `
		INSERT INTO apps (slug, org_id, display_name, description, category, runtime_backend, resource_version, created_at,
		updated_at)
		VALUES ($1, $2, $1, '', '', $3, 1, $4, $4) ON CONFLICT (slug) DO NOTHING`, slug, null(orgID),
		manifest.RuntimeLaunchableOCI, now)
	return tag.RowsAffected() == 1, err
}

// describeApp takes over what a manifest says of its app.
func describeApp(ctx context.Context, tx db.Tx, a manifest.App, now time.Time) error {
	return describe(ctx, tx, a, now, `WHERE slug = $1`)
}

// describeNewApp does so only while no version of the app has left draft.
func describeNewApp(ctx context.Context, tx db.Tx, a manifest.App, now time.Time) error {
	return describe(ctx, tx, a, now,
		`WHERE slug = $1 AND NOT EXISTS (SELECT 1 FROM app_versions v WHERE v.app_slug = $1 AND v.status <> 'draft')`)
}

func describe(ctx context.Context, tx db.Tx, a manifest.App, now time.Time, where string) error {
	_, err := tx.Exec(ctx, `
		UPDATE apps SET display_name = $2, description = $3, category = $4, runtime_backend = $5, described_at = $6,
		updated_at = $6,
		       resource_version = resource_version + 1 `+where, a.Slug, a.DisplayName, a.Description, a.Category,
		a.RuntimeBackend, now)
	return err
}

const appColumns = `a.slug, COALESCE(a.org_id::TEXT, ''), a.display_name, a.description, a.category, a.runtime_backend,
	a.described_at IS NOT NULL,
	COALESCE((SELECT v.version FROM app_versions v WHERE v.app_slug = a.slug AND v.status = 'active'
	ORDER BY v.published_at DESC, v.id DESC LIMIT 1), ''),
	a.resource_version`

func scanApp(row pgx.CollectableRow) (App, error) {
	var a App
	err := row.Scan(&a.Slug, &a.OrgID, &a.DisplayName, &a.Description, &a.Category, &a.RuntimeBackend, &a.Described,
		&a.LatestVersion, &a.ResourceVersion)
	return a, err
}

func selectApp(ctx context.Context, tx db.Tx, slug string) (App, error) {
	rows, err := tx.Query(ctx, `SELECT `+appColumns+` FROM apps a WHERE a.slug = $1`, slug)
	if err != nil {
		return App{}, err
	}
	a, err := pgx.CollectExactlyOneRow(rows, scanApp)
	return a, orNotFound(err)
}

func selectApps(ctx context.Context, tx db.Tx, f AppFilter) ([]App, error) {
	rows, err := tx.Query(ctx, `
		SELECT `+appColumns+` FROM apps a
		WHERE a.slug > $1 AND a.described_at IS NOT NULL
		  AND ($2 OR a.org_id = $3::UUID
		       OR (a.org_id IS NULL AND EXISTS (SELECT 1 FROM app_versions v WHERE v.app_slug = a.slug
		       AND v.status <> 'draft')))
		  AND ($4::UUID IS NULL OR EXISTS (SELECT 1 FROM entitlements e WHERE e.project_id = $4::UUID AND e.app_slug = a.slug
		  AND e.enabled))
		ORDER BY a.slug LIMIT $5`, f.After, f.All, null(f.OrgID), null(f.ProjectID), pageOf(f.Limit))
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scanApp)
}

func countApps(ctx context.Context, tx db.Tx, orgID string) (n int64, err error) {
	err = tx.QueryRow(ctx, `SELECT count(*) FROM apps WHERE org_id = $1`, orgID).Scan(&n)
	return n, err
}

func hasVersions(ctx context.Context, tx db.Tx, slug string) (exists bool, err error) {
	err = tx.QueryRow(ctx, `SELECT EXISTS (SELECT 1 FROM app_versions WHERE app_slug = $1)`, slug).Scan(&exists)
	return exists, err
}

func deleteApp(ctx context.Context, tx db.Tx, slug string) error {
	_, err := tx.Exec(ctx, `DELETE FROM apps WHERE slug = $1`, slug)
	return err
}

func deleteEntitlements(ctx context.Context, tx db.Tx, slug string) error {
	_, err := tx.Exec(ctx, `DELETE FROM entitlements WHERE app_slug = $1`, slug)
	return err
}

func updateAppOwner(ctx context.Context, tx db.Tx, a App, now time.Time) error {
	_, err := tx.Exec(ctx, `UPDATE apps SET org_id = $2, resource_version = $3, updated_at = $4 WHERE slug = $1`,
		a.Slug, null(a.OrgID), a.ResourceVersion, now)
	return err
}

const slugColumns = `a.slug, COALESCE(a.org_id::TEXT, ''), EXISTS (SELECT 1 FROM app_versions v
	WHERE v.app_slug = a.slug), a.created_at`

func scanSlug(row pgx.CollectableRow) (Slug, error) {
	var s Slug
	return s, row.Scan(&s.Slug, &s.OrgID, &s.Published, &s.CreatedAt)
}

func selectSlug(ctx context.Context, tx db.Tx, slug string) (Slug, error) {
	rows, err := tx.Query(ctx, `SELECT `+slugColumns+` FROM apps a WHERE a.slug = $1`, slug)
	if err != nil {
		return Slug{}, err
	}
	s, err := pgx.CollectExactlyOneRow(rows, scanSlug)
	return s, orNotFound(err)
}

func selectSlugs(ctx context.Context, tx db.Tx, orgID, after string, limit int) ([]Slug, error) {
	rows, err := tx.Query(ctx, `SELECT `+slugColumns+
		` FROM apps a WHERE a.org_id = $1 AND a.slug > $2 ORDER BY a.slug LIMIT $3`,
		orgID, after, limit)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scanSlug)
}

// ---- versions

func eachManifest(ctx context.Context, tx db.Tx, each func([]byte)) error {
	rows, err := tx.Query(ctx, `SELECT manifest_envelope FROM app_versions WHERE status <> 'retired'`)
	if err != nil {
		return err
	}
	var envelope []byte
	_, err = pgx.ForEachRow(rows, []any{&envelope}, func() error {
		each(envelope)
		return nil
	})
	return err
}

func insertVersion(ctx context.Context, tx db.Tx, v Version) error {
	_, err := tx.Exec(ctx, `
		INSERT INTO app_versions (app_slug, version, id, status, manifest, manifest_envelope, manifest_sha256,
		publisher_key_id, publisher_org_slug,
		                          published_at, resource_version, created_at, updated_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)`,
		v.AppSlug, v.Version, v.ID, v.Status, json.RawMessage(v.ManifestJSON), v.ManifestEnvelope, v.ManifestSHA256,
		v.PublisherKeyID, delegatedBy(v),
		nullTime(v.PublishedAt), v.ResourceVersion, v.CreatedAt, v.UpdatedAt)
	return err
}

func updateVersion(ctx context.Context, tx db.Tx, v Version) error {
	_, err := tx.Exec(ctx, `
		UPDATE app_versions SET status = $3, manifest = $4, manifest_envelope = $5, manifest_sha256 = $6, publisher_key_id =
		$7,
		       publisher_org_slug = $8, published_at = $9, resource_version = $10, updated_at = $11
		WHERE app_slug = $1 AND version = $2`,
		v.AppSlug, v.Version, v.Status, json.RawMessage(v.ManifestJSON), v.ManifestEnvelope, v.ManifestSHA256,
		v.PublisherKeyID, delegatedBy(v),
		nullTime(v.PublishedAt), v.ResourceVersion, v.UpdatedAt)
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
	published_at, resource_version, created_at, updated_at`

func scanVersion(row pgx.CollectableRow) (Version, error) {
	var (
		v         Version
		asJSON    []byte
		orgSlug   *string
		published *time.Time
	)
	err := row.Scan(&v.AppSlug, &v.Version, &v.ID, &v.Status, &asJSON, &v.ManifestEnvelope, &v.ManifestSHA256,
		&v.PublisherKeyID, &orgSlug,
		&published, &v.ResourceVersion, &v.CreatedAt, &v.UpdatedAt)
	if err != nil {
		return Version{}, err
	}
	v.ManifestJSON, v.PublishedAt = asJSON, timeOf(published)
	if orgSlug != nil {
		v.PublisherOrgSlug, v.Delegated = *orgSlug, true
	}
	v.Manifest, err = manifest.FromJSON(asJSON)
	return v, err
}

func selectVersion(ctx context.Context, tx db.Tx, slug, version string) (Version, error) {
	rows, err := tx.Query(ctx, `SELECT `+versionColumns+` FROM app_versions WHERE app_slug = $1 AND version = $2`, slug,
		version)
	if err != nil {
		return Version{}, err
	}
	v, err := pgx.CollectExactlyOneRow(rows, scanVersion)
	return v, orNotFound(err)
}

func selectVersions(ctx context.Context, tx db.Tx, f VersionFilter) ([]Version, error) {
	rows, err := tx.Query(ctx, `
		SELECT `+versionColumns+` FROM app_versions
		WHERE app_slug = $1 AND ($2 OR status <> 'draft') AND ($3::UUID IS NULL OR id < $3::UUID)
		ORDER BY id DESC LIMIT $4`, f.AppSlug, f.Drafts, null(f.After), pageOf(f.Limit))
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scanVersion)
}

// ---- publishers

func upsertPublisher(ctx context.Context, tx db.Tx, p Publisher, now time.Time) error {
	prefixes, err := json.Marshal(p.RepositoryPrefixes)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `
		INSERT INTO publishers (key_id, org_slug, public_key, repository_prefixes, issued_at, expires_at, delegation_envelope,
		resource_version, created_at, updated_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $9)
		ON CONFLICT (key_id, org_slug) DO UPDATE SET public_key = excluded.public_key, repository_prefixes =
		excluded.repository_prefixes,
			issued_at = excluded.issued_at, expires_at = excluded.expires_at, delegation_envelope = excluded.delegation_envelope,
			resource_version = excluded.resource_version, updated_at = excluded.updated_at`,
		p.KeyID, p.OrgSlug, p.PublicKey, json.RawMessage(prefixes), p.IssuedAt, p.ExpiresAt, p.DelegationEnvelope,
		p.ResourceVersion, now)
	return err
}

const publisherColumns = `key_id, org_slug, public_key, repository_prefixes, issued_at, expires_at, delegation_envelope,
	resource_version`

func scanPublisher(row pgx.CollectableRow) (Publisher, error) {
	var (
		p        Publisher
		prefixes []byte
	)
	err := row.Scan(&p.KeyID, &p.OrgSlug, &p.PublicKey, &prefixes, &p.IssuedAt, &p.ExpiresAt, &p.DelegationEnvelope,
		&p.ResourceVersion)
	if err != nil {
		return Publisher{}, err
	}
	return p, json.Unmarshal(prefixes, &p.RepositoryPrefixes)
}

func selectPublisher(ctx context.Context, tx db.Tx, keyID, orgSlug string) (Publisher, bool, error) {
	rows, err := tx.Query(ctx, `SELECT `+publisherColumns+` FROM publishers WHERE key_id = $1 AND org_slug = $2`, keyID,
		orgSlug)
	if err != nil {
		return Publisher{}, false, err
	}
	p, err := pgx.CollectExactlyOneRow(rows, scanPublisher)
	if db.IsNoRows(err) {
		return Publisher{}, false, nil
	}
	return p, err == nil, err
}

func selectPublishersWithKey(ctx context.Context, tx db.Tx, keyID string) ([]Publisher, error) {
	rows, err := tx.Query(ctx, `SELECT `+publisherColumns+` FROM publishers WHERE key_id = $1 ORDER BY org_slug`, keyID)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scanPublisher)
}

func selectPublishers(ctx context.Context, tx db.Tx, after string, limit int) ([]Publisher, error) {
	keyID, orgSlug, _ := strings.Cut(after, ".")
	rows, err := tx.Query(ctx, `
		SELECT `+publisherColumns+` FROM publishers WHERE $1 = '' OR (key_id, org_slug) > ($2, $3)
		ORDER BY key_id, org_slug LIMIT $4`, after, keyID, orgSlug, limit)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scanPublisher)
}

// ---- entitlements

func upsertEntitlement(ctx context.Context, tx db.Tx, e Entitlement) error {
	policy, err := json.Marshal(e.Policy)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `
		INSERT INTO entitlements (project_id, app_slug, org_id, enabled, policy_overrides, resource_version, updated_at,
		updated_by)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
		ON CONFLICT (project_id, app_slug) DO UPDATE SET enabled = excluded.enabled, policy_overrides =
		excluded.policy_overrides,
			resource_version = excluded.resource_version, updated_at = excluded.updated_at, updated_by = excluded.updated_by`,
		e.ProjectID, e.AppSlug, e.OrgID, e.Enabled, json.RawMessage(policy), e.ResourceVersion, e.UpdatedAt, e.UpdatedBy)
	return err
}

const entitlementColumns = `project_id, app_slug, org_id, enabled, policy_overrides, resource_version, updated_at,
	updated_by`

func scanEntitlement(row pgx.CollectableRow) (Entitlement, error) {
	var e Entitlement
	var policy []byte
	err := row.Scan(&e.ProjectID, &e.AppSlug, &e.OrgID, &e.Enabled, &policy, &e.ResourceVersion, &e.UpdatedAt,
		&e.UpdatedBy)
	if err != nil {
		return Entitlement{}, err
	}
	return e, json.Unmarshal(policy, &e.Policy)
}

func selectEntitlement(ctx context.Context, tx db.Tx, projectID, slug string) (Entitlement, error) {
	rows, err := tx.Query(ctx, `SELECT `+entitlementColumns+` FROM entitlements WHERE project_id = $1 AND app_slug = $2`,
		projectID, slug)
	if err != nil {
		return Entitlement{}, err
	}
	e, err := pgx.CollectExactlyOneRow(rows, scanEntitlement)
	return e, orNotFound(err)
}

func selectEntitlements(ctx context.Context, tx db.Tx, projectID, after string, limit int) ([]Entitlement, error) {
	rows, err := tx.Query(ctx, `SELECT `+entitlementColumns+
		` FROM entitlements WHERE project_id = $1 AND app_slug > $2 ORDER BY app_slug LIMIT $3`,
		projectID, after, limit)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scanEntitlement)
}
