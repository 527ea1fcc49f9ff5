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

func selectOrg(ctx context.Context, tx db.Tx, id string) (Org, error) {
	var o Org
	err := tx.QueryRow(ctx, `SELECT id, slug, name, created_at FROM orgs WHERE id = $1`, id).Scan(&o.ID, &o.Slug, &o.DisplayName, &o.CreatedAt)
	return o, absent(err)
}

func selectOrgs(ctx context.Context, tx db.Tx, only string, page Page) ([]Org, error) {
	rows, err := tx.Query(ctx, `
		SELECT id, slug, name, created_at FROM orgs
		WHERE ($1::UUID IS NULL OR id = $1::UUID) AND ($2::UUID IS NULL OR id > $2::UUID)
		ORDER BY id LIMIT $3`, null(only), null(page.After), page.Limit)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (Org, error) {
		var o Org
		return o, row.Scan(&o.ID, &o.Slug, &o.DisplayName, &o.CreatedAt)
	})
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

const projectColumns = `p.id, p.org_id, o.slug, p.slug, p.name, p.created_at FROM projects p JOIN orgs o ON o.id = p.org_id`

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
	rows, err := tx.Query(ctx, `
		SELECT `+projectColumns+`
		WHERE ($1::UUID IS NULL OR p.org_id = $1::UUID) AND (NOT $2::BOOL OR p.id = ANY($3::UUID[])) AND ($4::UUID IS NULL OR p.id > $4::UUID)
		ORDER BY p.id LIMIT $5`, null(f.orgID), f.some, f.ids, null(page.After), page.Limit)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (Project, error) { return scanProject(row) })
}

func insertUser(ctx context.Context, tx db.Tx, u User) (made bool, err error) {
	return affects(tx.Exec(ctx, `
		INSERT INTO users (id, org_id, email, name, platform_admin, created_at, updated_at) VALUES ($1, $2, $3, $4, $5, $6, $6)
		ON CONFLICT (email) DO NOTHING`, u.ID, null(u.OrgID), u.Email, u.DisplayName, u.PlatformAdmin, u.CreatedAt))
}

// orgWide is the scope of a role held in every project of the org.
const orgWide = "org"

func insertBinding(ctx context.Context, tx db.Tx, userID string, role Role, projectID string, now time.Time) error {
	scope := projectID
	if scope == "" {
		scope = orgWide
	}
	_, err := tx.Exec(ctx, `
		INSERT INTO role_bindings (user_id, role, scope, created_at) VALUES ($1, $2, $3, $4)
		ON CONFLICT (user_id, role, scope) DO NOTHING`, userID, string(role), scope, now)
	return err
}

// inOrg gives a binding as it was read, with its scope for the project.
func (b Binding) inOrg() Binding {
	if b.ProjectID == orgWide {
		b.ProjectID = ""
	}
	return b
}

// userFilter keeps one user, or those of one org; both empty keeps all.
type userFilter struct{ id, orgID string }

func selectUsers(ctx context.Context, tx db.Tx, f userFilter, page Page) ([]User, error) {
	rows, err := tx.Query(ctx, `
		SELECT u.id, COALESCE(u.org_id::TEXT, ''), u.email, u.name, u.platform_admin, u.created_at,
		       COALESCE((SELECT array_agg(b.role ORDER BY b.role) FROM role_bindings b WHERE b.user_id = u.id AND b.scope = 'org'), ARRAY[]::TEXT[])
		FROM users u
		WHERE ($1::UUID IS NULL OR u.id = $1::UUID) AND ($2::UUID IS NULL OR u.org_id = $2::UUID) AND ($3::UUID IS NULL OR u.id > $3::UUID)
		ORDER BY u.id LIMIT $4`, null(f.id), null(f.orgID), null(page.After), page.Limit)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (User, error) {
		var u User
		return u, row.Scan(&u.ID, &u.OrgID, &u.Email, &u.DisplayName, &u.PlatformAdmin, &u.CreatedAt, &u.Roles)
	})
}

func selectFirstAdmin(ctx context.Context, tx db.Tx) (User, bool, error) {
	var id string
	err := tx.QueryRow(ctx, `SELECT id FROM users WHERE platform_admin ORDER BY created_at, id LIMIT 1`).Scan(&id)
	if db.IsNoRows(err) {
		return User{}, false, nil
	}
	if err != nil {
		return User{}, false, err
	}
	u, err := GetUser(ctx, tx, id)
	return u, err == nil, err
}

func insertUserToken(ctx context.Context, tx db.Tx, t UserToken, hash []byte) error {
	_, err := tx.Exec(ctx, `
		INSERT INTO user_tokens (id, user_id, hash, description, expires_at, created_at) VALUES ($1, $2, $3, $4, $5, $6)`,
		t.ID, t.UserID, hash, t.Description, t.ExpiresAt, t.CreatedAt)
	return err
}

func countLiveTokens(ctx context.Context, tx db.Tx, userID string, now time.Time) (n int, err error) {
	err = tx.QueryRow(ctx, `SELECT count(*) FROM user_tokens WHERE user_id = $1 AND expires_at > $2 AND revoked_at IS NULL`, userID, now).Scan(&n)
	return n, err
}

func revokeTokens(ctx context.Context, tx db.Tx, userID string, now time.Time) (int64, error) {
	tag, err := tx.Exec(ctx, `UPDATE user_tokens SET revoked_at = $2 WHERE user_id = $1 AND revoked_at IS NULL AND expires_at > $2`, userID, now)
	return tag.RowsAffected(), err
}

func selectUserByToken(ctx context.Context, tx db.Tx, hash []byte, now time.Time) (Principal, error) {
	rows, err := tx.Query(ctx, `
		SELECT u.id, u.name, COALESCE(u.org_id::TEXT, ''), u.platform_admin, COALESCE(b.role, ''), COALESCE(b.scope, '')
		FROM user_tokens t JOIN users u ON u.id = t.user_id LEFT JOIN role_bindings b ON b.user_id = u.id
		WHERE t.hash = $1 AND t.expires_at > $2 AND t.revoked_at IS NULL ORDER BY b.role, b.scope`, hash, now)
	if err != nil {
		return Principal{}, err
	}
	var (
		p = Principal{Type: TypeUser}
		b Binding
	)
	_, err = pgx.ForEachRow(rows, []any{&p.ID, &p.Name, &p.OrgID, &p.PlatformAdmin, &b.Role, &b.ProjectID}, func() error {
		if b.Role != "" {
			p.Bindings = append(p.Bindings, b.inOrg())
		}
		return nil
	})
	if err != nil {
		return Principal{}, err
	}
	if p.ID == "" {
		return Principal{}, ErrUnauthenticated()
	}
	return p, nil
}

func insertServiceAccount(ctx context.Context, tx db.Tx, sa ServiceAccount) (made bool, err error) {
	return affects(tx.Exec(ctx, `
		INSERT INTO service_accounts (id, org_id, project_id, slug, name, description, role, status, created_at, updated_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $9)
		ON CONFLICT (project_id, slug) WHERE deleted_at IS NULL DO NOTHING`,
		sa.ID, sa.OrgID, sa.ProjectID, sa.Slug, sa.Name, sa.Description, string(sa.Role), sa.Status, sa.CreatedAt))
}

const serviceAccountColumns = `s.id, s.org_id, s.project_id, s.slug, s.name, s.description, s.role, s.status, s.resource_version, s.created_at`

func (sa *ServiceAccount) fields() []any {
	return []any{&sa.ID, &sa.OrgID, &sa.ProjectID, &sa.Slug, &sa.Name, &sa.Description, &sa.Role, &sa.Status, &sa.ResourceVersion, &sa.CreatedAt}
}

func selectServiceAccount(ctx context.Context, tx db.Tx, id string) (ServiceAccount, error) {
	var sa ServiceAccount
	err := tx.QueryRow(ctx, `SELECT `+serviceAccountColumns+` FROM service_accounts s WHERE s.id = $1 AND s.deleted_at IS NULL`, id).Scan(sa.fields()...)
	return sa, absent(err)
}

func selectServiceAccounts(ctx context.Context, tx db.Tx, projectID string, page Page) ([]ServiceAccount, error) {
	rows, err := tx.Query(ctx, `
		SELECT `+serviceAccountColumns+` FROM service_accounts s
		WHERE s.project_id = $1 AND s.deleted_at IS NULL AND ($2::UUID IS NULL OR s.id > $2::UUID)
		ORDER BY s.id LIMIT $3`, projectID, null(page.After), page.Limit)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (ServiceAccount, error) {
		var sa ServiceAccount
		return sa, row.Scan(sa.fields()...)
	})
}

func countServiceAccounts(ctx context.Context, tx db.Tx, projectID string) (n int, err error) {
	err = tx.QueryRow(ctx, `SELECT count(*) FROM service_accounts WHERE project_id = $1 AND deleted_at IS NULL`, projectID).Scan(&n)
	return n, err
}

func updateServiceAccount(ctx context.Context, tx db.Tx, id, status string, now time.Time) (version int64, err error) {
	err = tx.QueryRow(ctx, `
		UPDATE service_accounts SET status = $2, updated_at = $3, resource_version = resource_version + 1
		WHERE id = $1 RETURNING resource_version`, id, status, now).Scan(&version)
	return version, err
}

func markDeleted(ctx context.Context, tx db.Tx, id string, now time.Time) (version int64, err error) {
	err = tx.QueryRow(ctx, `
		UPDATE service_accounts SET status = 'disabled', deleted_at = $2, updated_at = $2, resource_version = resource_version + 1
		WHERE id = $1 RETURNING resource_version`, id, now).Scan(&version)
	return version, err
}

func insertKey(ctx context.Context, tx db.Tx, serviceAccountID string, key Key) error {
	_, err := tx.Exec(ctx, `INSERT INTO service_account_keys (id, service_account_id, public_key, created_at) VALUES ($1, $2, $3, $4)`,
		key.ID, serviceAccountID, []byte(key.Public), key.CreatedAt)
	return err
}

func revokeKeys(ctx context.Context, tx db.Tx, serviceAccountID string, now time.Time) error {
	_, err := tx.Exec(ctx, `UPDATE service_account_keys SET revoked_at = $2 WHERE service_account_id = $1 AND revoked_at IS NULL`, serviceAccountID, now)
	return err
}

// selectLiveKey finds an active account together with one of its keys that is not revoked.
func selectLiveKey(ctx context.Context, tx db.Tx, serviceAccountID, keyID string) (ServiceAccount, ed25519.PublicKey, error) {
	var sa ServiceAccount
	var public []byte
	err := tx.QueryRow(ctx, `
		SELECT `+serviceAccountColumns+`, k.public_key
		FROM service_accounts s JOIN service_account_keys k ON k.service_account_id = s.id
		WHERE s.id = $1 AND k.id = $2 AND s.status = 'active' AND s.deleted_at IS NULL AND k.revoked_at IS NULL`,
		serviceAccountID, keyID).Scan(append(sa.fields(), &public)...)
	return sa, public, absent(err)
}

// selectAccess finds what proves an access token: the hub's key that it names, and the live account key that it was given for.
func selectAccess(ctx context.Context, tx db.Tx, kid, serviceAccountID, keyID string) (ServiceAccount, ed25519.PublicKey, error) {
	var sa ServiceAccount
	var public []byte
	err := tx.QueryRow(ctx, `
		SELECT `+serviceAccountColumns+`, g.public_key
		FROM service_accounts s JOIN service_account_keys k ON k.service_account_id = s.id CROSS JOIN iam_signing_keys g
		WHERE g.id = $1 AND s.id = $2 AND k.id = $3 AND s.status = 'active' AND s.deleted_at IS NULL AND k.revoked_at IS NULL`,
		kid, serviceAccountID, keyID).Scan(append(sa.fields(), &public)...)
	return sa, public, absent(err)
}

// insertAssertion remembers a jti until it has expired and reports whether it was new.
func insertAssertion(ctx context.Context, tx db.Tx, serviceAccountID, jti string, expires, now time.Time) (fresh bool, err error) {
	if _, err := tx.Exec(ctx, `DELETE FROM service_account_assertions WHERE service_account_id = $1 AND expires_at < $2`, serviceAccountID, now); err != nil {
		return false, err
	}
	return affects(tx.Exec(ctx, `
		INSERT INTO service_account_assertions (service_account_id, jti, expires_at) VALUES ($1, $2, $3)
		ON CONFLICT (service_account_id, jti) DO NOTHING`, serviceAccountID, jti, expires))
}

func insertSigningKey(ctx context.Context, tx db.Tx, id string, public ed25519.PublicKey, sealed []byte, now time.Time) error {
	_, err := tx.Exec(ctx, `INSERT INTO iam_signing_keys (id, public_key, sealed_private_key, created_at) VALUES ($1, $2, $3, $4)`, id, []byte(public), sealed, now)
	return err
}

func selectSigningKey(ctx context.Context, tx db.Tx) (id string, sealed []byte, err error) {
	err = tx.QueryRow(ctx, `SELECT id, sealed_private_key FROM iam_signing_keys ORDER BY created_at DESC, id DESC LIMIT 1`).Scan(&id, &sealed)
	return id, sealed, absent(err)
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
