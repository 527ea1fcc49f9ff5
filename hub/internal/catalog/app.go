package catalog

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// Reserve makes sure that the slug belongs to the org (empty: to the platform): the first one who names it gets it. It
// returns the app and whether it is new.
func Reserve(ctx context.Context, tx db.Tx, slug, orgID string, now time.Time) (App, bool, error) {
	made, err := insertApp(ctx, tx, slug, orgID, now)
	if err != nil {
		return App{}, false, err
	}
	a, err := selectApp(ctx, tx, slug)
	if err != nil {
		return App{}, false, err
	}
	if a.OrgID != orgID {
		return App{}, false, conflict(CodeSlugTaken, "This app slug belongs to someone else; choose another one.").
			WithField("/app_slug", "is taken")
	}
	return a, made, nil
}

// GetApp returns an app of any owner.
func GetApp(ctx context.Context, tx db.Tx, slug string) (App, error) {
	return selectApp(ctx, tx, slug)
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

// Apps lists described apps by slug; apps of others only when they have a version beyond draft.
func Apps(ctx context.Context, tx db.Tx, f AppFilter) ([]App, error) {
	return selectApps(ctx, tx, f)
}

// CountApps is how many slugs belong to the org.
func CountApps(ctx context.Context, tx db.Tx, orgID string) (int64, error) {
	return countApps(ctx, tx, orgID)
}

// HasVersions reports whether anything was registered under the slug.
func HasVersions(ctx context.Context, tx db.Tx, slug string) (bool, error) {
	return hasVersions(ctx, tx, slug)
}

// Release makes the slug free for everybody. Entitlements to it go with it: they were given for the app of this org.
// The caller has made sure that nothing exists under the slug.
func Release(ctx context.Context, tx db.Tx, slug string) error {
	if err := deleteEntitlements(ctx, tx, slug); err != nil {
		return err
	}
	return deleteApp(ctx, tx, slug)
}

// Transfer gives the slug to another org (empty: to the platform), as Release does.
func Transfer(ctx context.Context, tx db.Tx, a App, orgID string, now time.Time) (App, error) {
	if err := deleteEntitlements(ctx, tx, a.Slug); err != nil {
		return App{}, err
	}
	a.OrgID = orgID
	a.ResourceVersion++
	return a, updateAppOwner(ctx, tx, a, now)
}

// Slug is an app's name and its owner.
type Slug struct {
	Slug, OrgID string
	// Published tells that versions exist under it.
	Published bool
	CreatedAt time.Time
}

// GetSlug returns one slug.
func GetSlug(ctx context.Context, tx db.Tx, slug string) (Slug, error) {
	return selectSlug(ctx, tx, slug)
}

// Slugs lists the slugs of an org; after is the last one of the page before.
func Slugs(ctx context.Context, tx db.Tx, orgID, after string, limit int) ([]Slug, error) {
	return selectSlugs(ctx, tx, orgID, after, pageOf(limit))
}
