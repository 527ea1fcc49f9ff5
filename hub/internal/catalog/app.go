package catalog

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/manifest"
)

// appColumns are the fields of App.
const appColumns = `a.slug, COALESCE(a.org_id::TEXT, ''), a.display_name, a.description, a.category, a.runtime_backend,
	a.described_at IS NOT NULL,
	COALESCE((SELECT v.version FROM app_versions v WHERE v.app_slug = a.slug AND v.status = 'active'
	ORDER BY v.published_at DESC, v.id DESC LIMIT 1), ''),
	a.resource_version`

// Reserve gives the slug to the org (empty: to the platform) unless another owner has it. It returns the app and
// whether it is new.
func Reserve(ctx context.Context, tx db.Tx, slug, orgID string, now time.Time) (App, bool, error) {
	tag, err := tx.Exec(ctx, `
		INSERT INTO apps (slug, org_id, display_name, description, category, runtime_backend, resource_version, created_at,
		updated_at)
		VALUES ($1, $2, $1, '', '', $3, 1, $4, $4) ON CONFLICT (slug) DO NOTHING`, slug, db.OrNull(orgID),
		manifest.RuntimeLaunchableOCI, now)
	if err != nil {
		return App{}, false, err
	}
	a, err := GetApp(ctx, tx, slug)
	if err != nil {
		return App{}, false, err
	}
	if a.OrgID != orgID {
		return App{}, false, conflict(CodeSlugTaken, "This app slug belongs to someone else; choose another one.").
			WithField("/app_slug", "is taken")
	}
	return a, tag.RowsAffected() == 1, nil
}

// GetApp returns an app of any owner.
func GetApp(ctx context.Context, tx db.Tx, slug string) (App, error) {
	a, err := db.SelectOne(ctx, tx, pgx.RowToStructByPos[App], `SELECT `+appColumns+` FROM apps a WHERE a.slug = $1`,
		slug)
	return a, orNotFound(err)
}

// AppFilter says which apps a listing shows.
type AppFilter struct {
	// OrgID shows the org's own apps beside the platform's; All shows every app and needs a platform admin.
	OrgID string
	All   bool
	// ProjectID, where set, shows only apps that the project is entitled to.
	ProjectID string
	// After is the last slug of the page before.
	After string
	Limit int
}

// Apps lists described apps by slug; apps of others only when they have a version that others see.
func Apps(ctx context.Context, tx db.Tx, f AppFilter) ([]App, error) {
	return db.Select(ctx, tx, pgx.RowToStructByPos[App], `
		SELECT `+appColumns+` FROM apps a
		WHERE a.slug > $1 AND a.described_at IS NOT NULL
		  AND ($2 OR a.org_id = $3::UUID
		       OR (a.org_id IS NULL AND EXISTS (SELECT 1 FROM app_versions v WHERE v.app_slug = a.slug
		       AND v.status NOT IN ('draft', 'staged'))))
		  AND ($4::UUID IS NULL OR EXISTS (SELECT 1 FROM entitlements e WHERE e.project_id = $4::UUID AND e.app_slug = a.slug
		  AND e.enabled))
		ORDER BY a.slug LIMIT $5`, f.After, f.All, db.OrNull(f.OrgID), db.OrNull(f.ProjectID), pageOf(f.Limit))
}

// describe copies the description of an app from a manifest, where the condition holds.
func describe(ctx context.Context, tx db.Tx, a manifest.App, now time.Time, where string) error {
	_, err := tx.Exec(ctx, `
		UPDATE apps SET display_name = $2, description = $3, category = $4, runtime_backend = $5, described_at = $6,
		updated_at = $6,
		       resource_version = resource_version + 1 `+where, a.Slug, a.DisplayName, a.Description, a.Category,
		a.RuntimeBackend, now)
	return err
}

// CountApps returns how many slugs belong to the org.
func CountApps(ctx context.Context, tx db.Tx, orgID string) (int64, error) {
	return db.Value[int64](ctx, tx, `SELECT count(*) FROM apps WHERE org_id = $1`, orgID)
}

// VisibleTo adds that an app, by the column of its slug, is the org's own, the platform's, or none that there is: an
// org's own apps are nobody else's to know of.
func VisibleTo(orgID string) func(w *db.Where, slug string) {
	return func(w *db.Where, slug string) {
		w.And("NOT EXISTS (SELECT 1 FROM apps a WHERE a.slug = " + slug +
			" AND a.org_id IS NOT NULL AND a.org_id IS DISTINCT FROM " + w.Arg(db.OrNull(orgID)) + ")")
	}
}

// HasVersions reports whether a version is registered under the slug.
func HasVersions(ctx context.Context, tx db.Tx, slug string) (bool, error) {
	return db.Value[bool](ctx, tx, `SELECT EXISTS (SELECT 1 FROM app_versions WHERE app_slug = $1)`, slug)
}

// Release deletes an app without versions and its entitlements, which were granted for the app of this org; any owner
// may then reserve the slug.
func Release(ctx context.Context, tx db.Tx, slug string) error {
	if err := deleteEntitlements(ctx, tx, slug); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, `DELETE FROM apps WHERE slug = $1`, slug)
	return err
}

// Transfer gives the slug to another org (empty: to the platform) and deletes its entitlements, as Release does.
func Transfer(ctx context.Context, tx db.Tx, a App, orgID string, now time.Time) (App, error) {
	if err := deleteEntitlements(ctx, tx, a.Slug); err != nil {
		return App{}, err
	}
	a.OrgID = orgID
	a.ResourceVersion++
	_, err := tx.Exec(ctx, `UPDATE apps SET org_id = $2, resource_version = $3, updated_at = $4 WHERE slug = $1`,
		a.Slug, db.OrNull(a.OrgID), a.ResourceVersion, now)
	return a, err
}

// Slug is an app's name and its owner.
type Slug struct {
	Slug, OrgID string
	// Published is true where versions exist under it.
	Published bool
	CreatedAt time.Time
}

// slugColumns are the fields of Slug.
const slugColumns = `a.slug, COALESCE(a.org_id::TEXT, ''), EXISTS (SELECT 1 FROM app_versions v
	WHERE v.app_slug = a.slug), a.created_at`

// GetSlug returns one slug.
func GetSlug(ctx context.Context, tx db.Tx, slug string) (Slug, error) {
	s, err := db.SelectOne(ctx, tx, pgx.RowToStructByPos[Slug], `SELECT `+slugColumns+` FROM apps a WHERE a.slug = $1`,
		slug)
	return s, orNotFound(err)
}

// Slugs lists the slugs of an org; after is the last one of the page before.
func Slugs(ctx context.Context, tx db.Tx, orgID string, page db.Page) ([]Slug, error) {
	return db.Select(ctx, tx, pgx.RowToStructByPos[Slug], `SELECT `+slugColumns+
		` FROM apps a WHERE a.org_id = $1 AND a.slug > $2 ORDER BY a.slug LIMIT $3`, orgID, page.After,
		pageOf(page.Limit))
}
