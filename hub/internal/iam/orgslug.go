package iam

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// GetOrgBySlug finds an org by the slug that stands in repository names and delegations.
func GetOrgBySlug(ctx context.Context, tx db.Tx, slug string) (Org, error) {
	var id string
	if err := tx.QueryRow(ctx, `SELECT id FROM orgs WHERE slug = $1`, slug).Scan(&id); err != nil {
		if db.IsNoRows(err) {
			return Org{}, ErrNotFound()
		}
		return Org{}, err
	}
	return GetOrg(ctx, tx, id)
}
