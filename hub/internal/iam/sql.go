package iam

import (
	"cmp"
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

const orgColumns = `id, slug, name, created_at FROM orgs`

func insertOrg(ctx context.Context, tx db.Tx, o Org) (made bool, err error) {
	return affects(tx.Exec(ctx, `
		INSERT INTO orgs (id, slug, name, created_at, updated_at) VALUES ($1, $2, $3, $4, $4)
		ON CONFLICT (slug) DO NOTHING`, o.ID, o.Slug, o.DisplayName, o.CreatedAt))
}

const projectColumns = `p.id, p.org_id, o.slug, p.slug, p.name, p.created_at, p.platform FROM projects p JOIN orgs o
	ON o.id = p.org_id`

func insertProject(ctx context.Context, tx db.Tx, p Project) (made bool, err error) {
	return affects(tx.Exec(ctx, `
		INSERT INTO projects (id, org_id, slug, name, platform, created_at, updated_at)
		VALUES ($1, $2, $3, $4, $5, $6, $6)
		ON CONFLICT (org_id, slug) DO NOTHING`, p.ID, p.OrgID, p.Slug, p.DisplayName, p.Platform, p.CreatedAt))
}

const serviceAccountColumns = `s.id, s.org_id, s.project_id, s.name, s.slug, s.description, s.role,
	(SELECT c.permissions FROM custom_roles c WHERE c.id = s.custom_role_id), s.status,
	COALESCE(s.app_instance_id::TEXT, ''), s.resource_version, s.created_at`

// updateServiceAccount saves the account's status, also that it is deleted, and returns it with its new resource
// version.
func updateServiceAccount(ctx context.Context, tx db.Tx, sa ServiceAccount, deleted bool,
	now time.Time,
) (ServiceAccount, error) {
	err := tx.QueryRow(ctx, `
		UPDATE service_accounts SET status = $2, updated_at = $3, resource_version = resource_version + 1,
		       deleted_at = CASE WHEN $4::BOOL THEN $3 ELSE deleted_at END,
		       custom_role_id = CASE WHEN $4::BOOL THEN NULL ELSE custom_role_id END
		WHERE id = $1 RETURNING resource_version`, sa.ID, sa.Status, now, deleted).Scan(&sa.ResourceVersion)
	return sa, err
}

func insertKey(ctx context.Context, tx db.Tx, serviceAccountID string, key Key) error {
	_, err := tx.Exec(ctx,
		`INSERT INTO service_account_keys (id, service_account_id, public_key, created_at) VALUES ($1, $2, $3, $4)`,
		key.ID, serviceAccountID, []byte(key.Public), key.CreatedAt)
	return err
}

// liveKey is true for a key k that is valid at a time, which is a parameter.
const liveKey = `k.revoked_at IS NULL AND (k.expires_at IS NULL OR k.expires_at > `

// readKeys reads the valid keys of the accounts.
func readKeys(ctx context.Context, tx db.Tx, accounts []ServiceAccount, now time.Time) error {
	ids := make([]string, len(accounts))
	for i, sa := range accounts {
		ids[i] = sa.ID
	}
	keys := map[string][]PublicKey{}
	_, err := db.Select(ctx, tx, func(row pgx.CollectableRow) (k PublicKey, err error) {
		var of string
		var end *time.Time
		if err = row.Scan(&of, &k.ID, &k.CreatedAt, &end); end != nil {
			k.ExpiresAt = *end
		}
		keys[of] = append(keys[of], k)
		return k, err
	}, `SELECT k.service_account_id, k.id, k.created_at, k.expires_at FROM service_account_keys k
		WHERE k.service_account_id = ANY($1::UUID[]) AND `+liveKey+`$2) ORDER BY k.created_at, k.id`, ids, now)
	for i := range accounts {
		accounts[i].Keys = keys[accounts[i].ID]
	}
	return err
}

// replaceKeys ends the account's keys: the newest of those that are valid after the overlap, the others now.
func replaceKeys(ctx context.Context, tx db.Tx, serviceAccountID string, now time.Time, overlap time.Duration) error {
	if overlap == 0 {
		return revokeKeys(ctx, tx, serviceAccountID, now)
	}
	_, err := tx.Exec(ctx, `
		UPDATE service_account_keys SET
		       expires_at = CASE WHEN expires_at IS NULL THEN $3::TIMESTAMPTZ ELSE expires_at END,
		       revoked_at = CASE WHEN expires_at IS NULL THEN revoked_at ELSE $2::TIMESTAMPTZ END
		WHERE service_account_id = $1 AND revoked_at IS NULL`, serviceAccountID, now, now.Add(overlap))
	return err
}

func revokeKeys(ctx context.Context, tx db.Tx, serviceAccountID string, now time.Time) error {
	_, err := tx.Exec(ctx,
		`UPDATE service_account_keys SET revoked_at = $2 WHERE service_account_id = $1 AND revoked_at IS NULL`,
		serviceAccountID, now)
	return err
}

const userColumns = `u.id, COALESCE(u.org_id::TEXT, ''), u.email, u.name, u.platform_admin,
	COALESCE((SELECT array_agg(b.role ORDER BY b.role) FROM role_bindings b WHERE b.user_id = u.id AND b.scope = 'org'),
		ARRAY[]::TEXT[]),
	u.disabled_at IS NOT NULL, u.resource_version, u.created_at FROM users u`

// updateUser saves u and returns it with its new resource version.
func updateUser(ctx context.Context, tx db.Tx, u User, now time.Time) (User, error) {
	err := tx.QueryRow(ctx, `
		UPDATE users SET org_id = $2, email = $3, platform_admin = $4, updated_at = $6, resource_version = resource_version +
		1,
		       disabled_at = CASE WHEN $5::BOOL THEN COALESCE(disabled_at, $6) END
		WHERE id = $1 RETURNING resource_version`, u.ID, db.OrNull(u.OrgID), u.Email, u.PlatformAdmin, u.Disabled,
		now).Scan(&u.ResourceVersion)
	return u, err
}

// revokeTokens ends the user's tokens and sessions, and returns how many there were.
func revokeTokens(ctx context.Context, tx db.Tx, userID string, now time.Time) (int64, error) {
	sessions, err := tx.Exec(ctx,
		`UPDATE sessions SET revoked_at = $2 WHERE user_id = $1 AND revoked_at IS NULL AND expires_at > $2`, userID, now)
	if err != nil {
		return 0, err
	}
	tokens, err := tx.Exec(ctx,
		`UPDATE user_tokens SET revoked_at = $2 WHERE user_id = $1 AND revoked_at IS NULL AND expires_at > $2`, userID, now)
	return sessions.RowsAffected() + tokens.RowsAffected(), err
}

// orgWide is the scope of a role held in every project of the org.
const orgWide = "org"

// insertBindings gives the user the roles in the project, or in the whole org where projectID is empty.
func insertBindings(ctx context.Context, tx db.Tx, userID string, roles []Role, projectID string,
	now time.Time,
) error {
	_, err := tx.Exec(ctx, `
		INSERT INTO role_bindings (user_id, role, custom_role_id, scope, created_at)
		SELECT $1::UUID, r.role, CASE WHEN length(r.role) = 36 THEN r.role::UUID END, $3::TEXT, $4::TIMESTAMPTZ
		FROM unnest($2::TEXT[]) AS r (role)
		ON CONFLICT (user_id, role, scope) DO NOTHING`, userID, roles, cmp.Or(projectID, orgWide), now)
	return err
}

// deleteBindings takes every role of the scope from the user; of every scope where it is empty.
func deleteBindings(ctx context.Context, tx db.Tx, userID, scope string) error {
	_, err := tx.Exec(ctx, `DELETE FROM role_bindings WHERE user_id = $1 AND ($2 = '' OR scope = $2)`, userID, scope)
	return err
}

// absent makes the error of a query without a row NotFound.
func absent(err error) error {
	if db.IsNoRows(err) {
		return ErrNotFound()
	}
	return err
}

func affects(tag pgconn.CommandTag, err error) (bool, error) { return tag.RowsAffected() > 0, err }
