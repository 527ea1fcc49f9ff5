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
			At("/app_slug", "is taken")
	}
	return a, made, nil
}

// GetApp returns an app whoever owns it.
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
