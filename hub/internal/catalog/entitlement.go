package catalog

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// PutEntitlement grants, narrows or withdraws an app for a project. The app must be one that the org may know of.
func PutEntitlement(ctx context.Context, tx db.Tx, e Entitlement,
	now time.Time,
) (before *Entitlement, after Entitlement, err error) {
	a, err := GetApp(ctx, tx, e.AppSlug)
	if err != nil {
		return nil, Entitlement{}, err
	}
	if !a.VisibleTo(e.OrgID) {
		return nil, Entitlement{}, notFound()
	}
	old, err := GetEntitlement(ctx, tx, e.ProjectID, e.AppSlug)
	switch {
	case err == nil:
		before, e.ResourceVersion = &old, old.ResourceVersion+1
	case fault.Is(err, fault.NotFound):
		e.ResourceVersion = 1
	default:
		return nil, Entitlement{}, err
	}
	e.UpdatedAt = now
	_, err = tx.Exec(ctx, `
		INSERT INTO entitlements (project_id, app_slug, org_id, enabled, policy_overrides, resource_version, updated_at,
		updated_by)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
		ON CONFLICT (project_id, app_slug) DO UPDATE SET enabled = excluded.enabled, policy_overrides =
		excluded.policy_overrides,
			resource_version = excluded.resource_version, updated_at = excluded.updated_at, updated_by = excluded.updated_by`,
		e.ProjectID, e.AppSlug, e.OrgID, e.Enabled, e.Policy, e.ResourceVersion, e.UpdatedAt, e.UpdatedBy)
	return before, e, err
}

// entitlementColumns are the fields of Entitlement.
const entitlementColumns = `project_id, org_id, app_slug, enabled, policy_overrides, updated_at, updated_by,
	resource_version`

// GetEntitlement returns a project's entitlement to an app.
func GetEntitlement(ctx context.Context, tx db.Tx, projectID, slug string) (Entitlement, error) {
	e, err := db.SelectOne(ctx, tx, pgx.RowToStructByPos[Entitlement], `SELECT `+entitlementColumns+
		` FROM entitlements WHERE project_id = $1 AND app_slug = $2`, projectID, slug)
	return e, orNotFound(err)
}

// Entitlements lists a project's entitlements by slug; after is the last slug of the page before.
func Entitlements(ctx context.Context, tx db.Tx, projectID string, page db.Page) ([]Entitlement, error) {
	return db.Select(ctx, tx, pgx.RowToStructByPos[Entitlement], `SELECT `+entitlementColumns+
		` FROM entitlements WHERE project_id = $1 AND app_slug > $2 ORDER BY app_slug LIMIT $3`,
		projectID, page.After, pageOf(page.Limit))
}

// deleteEntitlements deletes the entitlements of all projects to an app.
func deleteEntitlements(ctx context.Context, tx db.Tx, slug string) error {
	_, err := tx.Exec(ctx, `DELETE FROM entitlements WHERE app_slug = $1`, slug)
	return err
}
