package catalog

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// PutEntitlement grants, narrows or withdraws an app for a project. The app must be one that the org may know of.
func PutEntitlement(ctx context.Context, tx db.Tx, e Entitlement,
	now time.Time,
) (before *Entitlement, after Entitlement, err error) {
	a, err := selectApp(ctx, tx, e.AppSlug)
	if err != nil {
		return nil, Entitlement{}, err
	}
	if !a.VisibleTo(e.OrgID) {
		return nil, Entitlement{}, notFound()
	}
	old, err := selectEntitlement(ctx, tx, e.ProjectID, e.AppSlug)
	switch {
	case err == nil:
		before, e.ResourceVersion = &old, old.ResourceVersion+1
	case fault.Is(err, fault.NotFound):
		e.ResourceVersion = 1
	default:
		return nil, Entitlement{}, err
	}
	e.UpdatedAt = now
	return before, e, upsertEntitlement(ctx, tx, e)
}

// GetEntitlement returns a project's entitlement to an app.
func GetEntitlement(ctx context.Context, tx db.Tx, projectID, slug string) (Entitlement, error) {
	return selectEntitlement(ctx, tx, projectID, slug)
}

// Entitlements lists a project's entitlements by slug; after is the last slug of the page before.
func Entitlements(ctx context.Context, tx db.Tx, projectID, after string, limit int) ([]Entitlement, error) {
	return selectEntitlements(ctx, tx, projectID, after, pageOf(limit))
}
