package iam

import (
	"context"
	"crypto/ed25519"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

func insertOrg(ctx context.Context, tx db.Tx, o Org) (made bool, err error) {
	return affects(tx.Exec(ctx, `
		INSERT INTO orgs (id, slug, name, created_at, updated_at) VALUES ($1, $2, $3, $4, $4)
		ON CONFLICT (slug) DO NOTHING`, o.ID, o.Slug, o.DisplayName, o.CreatedAt))
}

const orgColumns = `id, slug, name, created_at FROM orgs`

func scanOrg(row pgx.Row) (Org, error) {
	var o Org
	return o, row.Scan(&o.ID, &o.Slug, &o.DisplayName, &o.CreatedAt)
}

func selectOrg(ctx context.Context, tx db.Tx, id string) (Org, error) {
	o, err := scanOrg(tx.QueryRow(ctx, `SELECT `+orgColumns+` WHERE id = $1`, id))
	return o, absent(err)
}

func selectOrgs(ctx context.Context, tx db.Tx, only string, page Page) ([]Org, error) {
	return collect(ctx, tx, scanOrg, `
		SELECT `+orgColumns+`
		WHERE ($1::UUID IS NULL OR id = $1::UUID) AND ($2::UUID IS NULL OR id > $2::UUID)
		ORDER BY id LIMIT $3`, null(only), null(page.After), page.Limit)
}

func insertProject(ctx context.Context, tx db.Tx, p Project) (made bool, err error) {
	return affects(tx.Exec(ctx, `
		INSERT INTO projects (id, org_id, slug, name, created_at, updated_at) VALUES ($1, $2, $3, $4, $5, $5)
		ON CONFLICT (org_id, slug) DO NOTHING`, p.ID, p.OrgID, p.Slug, p.DisplayName, p.CreatedAt))
}

func countProjects(ctx context.Context, tx db.Tx, orgID string) (n int, err error) {
	err = tx.QueryRow(ctx, `SELECT count(*) FROM projects WHERE org_id = $1`, orgID).Scan(&n)
	return n, err
}

const projectColumns = `p.id, p.org_id, o.slug, p.slug, p.name, p.created_at FROM projects p JOIN orgs o
	ON o.id = p.org_id`

func scanProject(row pgx.Row) (Project, error) {
	var p Project
	return p, row.Scan(&p.ID, &p.OrgID, &p.OrgSlug, &p.Slug, &p.DisplayName, &p.CreatedAt)
}

func selectProject(ctx context.Context, tx db.Tx, id string) (Project, error) {
	p, err := scanProject(tx.QueryRow(ctx, `SELECT `+projectColumns+` WHERE p.id = $1`, id))
	return p, absent(err)
}

// projectFilter keeps projects of orgID (empty: any) and, where some is set, only those in ids.
type projectFilter struct {
	orgID string
	some  bool
	ids   []string
}

func selectProjects(ctx context.Context, tx db.Tx, f projectFilter, page Page) ([]Project, error) {
	return collect(ctx, tx, scanProject, `
		SELECT `+projectColumns+`
		WHERE ($1::UUID IS NULL OR p.org_id = $1::UUID) AND (NOT $2::BOOL OR p.id = ANY($3::UUID[])) AND ($4::UUID IS NULL
		OR p.id > $4::UUID)
		ORDER BY p.id LIMIT $5`, null(f.orgID), f.some, f.ids, null(page.After), page.Limit)
}

func insertServiceAccount(ctx context.Context, tx db.Tx, sa ServiceAccount) (made bool, err error) {
	return affects(tx.Exec(ctx, `
		INSERT INTO service_accounts (id, org_id, project_id, slug, name, description, role, status, created_at, updated_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $9)
		ON CONFLICT (project_id, slug) WHERE deleted_at IS NULL DO NOTHING`,
		sa.ID, sa.OrgID, sa.ProjectID, sa.Slug, sa.Name, sa.Description, string(sa.Role), sa.Status, sa.CreatedAt))
}

const serviceAccountColumns = `s.id, s.org_id, s.project_id, s.slug, s.name, s.description, s.role, s.status,
	s.resource_version, s.created_at`

func (sa *ServiceAccount) fields() []any {
	return []any{
		&sa.ID, &sa.OrgID, &sa.ProjectID, &sa.Slug, &sa.Name, &sa.Description, &sa.Role, &sa.Status,
		&sa.ResourceVersion, &sa.CreatedAt,
	}
}

func selectServiceAccount(ctx context.Context, tx db.Tx, id string) (ServiceAccount, error) {
	var sa ServiceAccount
	err := tx.QueryRow(ctx, `SELECT `+serviceAccountColumns+
		` FROM service_accounts s WHERE s.id = $1 AND s.deleted_at IS NULL`, id).Scan(sa.fields()...)
	return sa, absent(err)
}

// ListServiceAccounts lists the accounts of a project.
func ListServiceAccounts(ctx context.Context, tx db.Tx, projectID string, page Page) ([]ServiceAccount, error) {
	page, err := page.check()
	if err != nil {
		return nil, err
	}
	return collect(ctx, tx, func(row pgx.Row) (ServiceAccount, error) {
		var sa ServiceAccount
		return sa, row.Scan(sa.fields()...)
	}, `
		SELECT `+serviceAccountColumns+` FROM service_accounts s
		WHERE s.project_id = $1 AND s.deleted_at IS NULL AND ($2::UUID IS NULL OR s.id > $2::UUID)
		ORDER BY s.id LIMIT $3`, projectID, null(page.After), page.Limit)
}

func countServiceAccounts(ctx context.Context, tx db.Tx, projectID string) (n int, err error) {
	err = tx.QueryRow(ctx, `SELECT count(*) FROM service_accounts WHERE project_id = $1 AND deleted_at IS NULL`,
		projectID).Scan(&n)
	return n, err
}

// updateServiceAccount saves the account's status, also that it is deleted, and returns it with its new resource
// version.
func updateServiceAccount(ctx context.Context, tx db.Tx, sa ServiceAccount, deleted bool,
	now time.Time,
) (ServiceAccount, error) {
	err := tx.QueryRow(ctx, `
		UPDATE service_accounts SET status = $2, updated_at = $3, resource_version = resource_version + 1,
		       deleted_at = CASE WHEN $4::BOOL THEN $3 ELSE deleted_at END
		WHERE id = $1 RETURNING resource_version`, sa.ID, sa.Status, now, deleted).Scan(&sa.ResourceVersion)
	return sa, err
}

func insertKey(ctx context.Context, tx db.Tx, serviceAccountID string, key Key) error {
	_, err := tx.Exec(ctx,
		`INSERT INTO service_account_keys (id, service_account_id, public_key, created_at) VALUES ($1, $2, $3, $4)`,
		key.ID, serviceAccountID, []byte(key.Public), key.CreatedAt)
	return err
}

func revokeKeys(ctx context.Context, tx db.Tx, serviceAccountID string, now time.Time) error {
	_, err := tx.Exec(ctx,
		`UPDATE service_account_keys SET revoked_at = $2 WHERE service_account_id = $1 AND revoked_at IS NULL`,
		serviceAccountID, now)
	return err
}

// selectLiveKey finds an active account together with one of its keys that is not revoked.
func selectLiveKey(ctx context.Context, tx db.Tx, serviceAccountID,
	keyID string,
) (ServiceAccount, ed25519.PublicKey, error) {
	var sa ServiceAccount
	var public []byte
	err := tx.QueryRow(ctx, `
		SELECT `+serviceAccountColumns+`, k.public_key
		FROM service_accounts s JOIN service_account_keys k ON k.service_account_id = s.id
		WHERE s.id = $1 AND k.id = $2 AND s.status = 'active' AND s.deleted_at IS NULL AND k.revoked_at IS NULL`,
		serviceAccountID, keyID).Scan(append(sa.fields(), &public)...)
	return sa, public, absent(err)
}

// selectAccess finds what proves an access token: the hub's key that it names, and the live account key that it was
// given for.
func selectAccess(ctx context.Context, tx db.Tx, kid, serviceAccountID,
	keyID string,
) (ServiceAccount, ed25519.PublicKey, error) {
	var sa ServiceAccount
	var public []byte
	err := tx.QueryRow(ctx, `
		SELECT `+serviceAccountColumns+`, g.public_key
		FROM service_accounts s JOIN service_account_keys k ON k.service_account_id = s.id CROSS JOIN iam_signing_keys g
		WHERE g.id = $1 AND s.id = $2 AND k.id = $3 AND s.status = 'active' AND s.deleted_at IS NULL
		AND k.revoked_at IS NULL`,
		kid, serviceAccountID, keyID).Scan(append(sa.fields(), &public)...)
	return sa, public, absent(err)
}

// insertAssertion remembers a jti until it has expired and reports whether it was new.
func insertAssertion(ctx context.Context, tx db.Tx, serviceAccountID, jti string, expires,
	now time.Time,
) (fresh bool, err error) {
	if _, err := tx.Exec(ctx, `DELETE FROM service_account_assertions WHERE service_account_id = $1 AND expires_at < $2`,
		serviceAccountID, now); err != nil {
		return false, err
	}
	return affects(tx.Exec(ctx, `
		INSERT INTO service_account_assertions (service_account_id, jti, expires_at) VALUES ($1, $2, $3)
		ON CONFLICT (service_account_id, jti) DO NOTHING`, serviceAccountID, jti, expires))
}

func insertSigningKey(ctx context.Context, tx db.Tx, id string, public ed25519.PublicKey, sealed []byte,
	now time.Time,
) error {
	_, err := tx.Exec(ctx,
		`INSERT INTO iam_signing_keys (id, public_key, sealed_private_key, created_at) VALUES ($1, $2, $3, $4)`, id,
		[]byte(public), sealed, now)
	return err
}

func selectSigningKey(ctx context.Context, tx db.Tx) (id string, sealed []byte, err error) {
	err = tx.QueryRow(ctx,
		`SELECT id, sealed_private_key FROM iam_signing_keys ORDER BY created_at DESC, id DESC LIMIT 1`).Scan(&id, &sealed)
	return id, sealed, absent(err)
}

// collect reads all rows of a query.
func collect[T any](ctx context.Context, tx db.Tx, scan func(pgx.Row) (T, error), sql string,
	args ...any,
) ([]T, error) {
	rows, err := tx.Query(ctx, sql, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (T, error) { return scan(row) })
}

func absent(err error) error {
	if db.IsNoRows(err) {
		return ErrNotFound()
	}
	return err
}

func null(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

func affects(tag pgconn.CommandTag, err error) (bool, error) { return tag.RowsAffected() > 0, err }
