package iam

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// RenewInstanceAccount gives the service account of an app instance a new key; the one that it replaces stays valid for
// the overlap, and dead ones are deleted. sa names the instance with its org and project, and is made, with its ID,
// where the instance has no account yet; made says so. It has no role: policies.cedar says what it may.
func RenewInstanceAccount(ctx context.Context, tx db.Tx, sa ServiceAccount, key Key,
	overlap time.Duration,
) (_ ServiceAccount, made bool, err error) {
	has, err := instanceAccount(ctx, tx, sa.AppInstanceID)
	switch {
	case db.IsNoRows(err):
		sa.Slug, sa.Status, sa.ResourceVersion, sa.CreatedAt = sa.AppInstanceID, StatusActive, 1, key.CreatedAt
		if _, err := tx.Exec(ctx, `
			INSERT INTO service_accounts (id, org_id, project_id, app_instance_id, slug, name, description, role, status,
				created_at, updated_at)
			VALUES ($1, $2, $3, $4, $5, $6, $7, '', $8, $9, $9)`, sa.ID, sa.OrgID, sa.ProjectID, sa.AppInstanceID, sa.Slug,
			sa.Name, sa.Description, sa.Status, sa.CreatedAt); err != nil {
			return sa, false, err
		}
		return sa, true, insertKey(ctx, tx, sa.ID, key)
	case err != nil:
		return sa, false, err
	}
	if err := replaceKeys(ctx, tx, has.ID, key.CreatedAt, overlap); err != nil {
		return has, false, err
	}
	if _, err := tx.Exec(ctx, `DELETE FROM service_account_keys
		WHERE service_account_id = $1 AND (revoked_at IS NOT NULL OR expires_at <= $2)`, has.ID, key.CreatedAt); err != nil {
		return has, false, err
	}
	if err := insertKey(ctx, tx, has.ID, key); err != nil {
		return has, false, err
	}
	has, err = updateServiceAccount(ctx, tx, has, false, key.CreatedAt)
	return has, false, err
}

// EndInstanceAccount removes the service account of an app instance, with its keys; ended is false where it has none.
func EndInstanceAccount(ctx context.Context, tx db.Tx, instanceID string,
	now time.Time,
) (sa ServiceAccount, ended bool, err error) {
	sa, err = instanceAccount(ctx, tx, instanceID)
	if db.IsNoRows(err) {
		return sa, false, nil
	}
	if err != nil {
		return sa, false, err
	}
	for _, table := range []string{"service_account_keys", "service_account_assertions"} {
		if _, err := tx.Exec(ctx, `DELETE FROM `+table+` WHERE service_account_id = $1`, sa.ID); err != nil {
			return sa, false, err
		}
	}
	sa.Status = StatusDisabled
	sa, err = updateServiceAccount(ctx, tx, sa, true, now)
	return sa, true, err
}

func instanceAccount(ctx context.Context, tx db.Tx, instanceID string) (ServiceAccount, error) {
	return db.SelectOne(ctx, tx, pgx.RowToStructByPos[ServiceAccount], `SELECT `+serviceAccountColumns+`
		FROM service_accounts s WHERE s.app_instance_id = $1 AND s.deleted_at IS NULL`, instanceID)
}
