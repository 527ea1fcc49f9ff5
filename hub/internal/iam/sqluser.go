package iam

import (
	"cmp"
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
)

func insertUser(ctx context.Context, tx db.Tx, u User) (made bool, err error) {
	return affects(tx.Exec(ctx, `
		INSERT INTO users (id, org_id, email, name, platform_admin, created_at, updated_at)
		VALUES ($1, $2, $3, $4, $5, $6, $6)
		ON CONFLICT (email) DO NOTHING`, u.ID, null(u.OrgID), u.Email, u.DisplayName, u.PlatformAdmin, u.CreatedAt))
}

// orgWide is the scope of a role held in every project of the org.
const orgWide = "org"

// insertBindings gives the user the roles in the project, or in the whole org where projectID is empty.
func insertBindings(ctx context.Context, tx db.Tx, userID string, roles []Role, projectID string,
	now time.Time,
) error {
	_, err := tx.Exec(ctx, `
		INSERT INTO role_bindings (user_id, role, scope, created_at)
		SELECT $1::UUID, unnest($2::TEXT[]), $3::TEXT, $4::TIMESTAMPTZ
		ON CONFLICT (user_id, role, scope) DO NOTHING`, userID, roles, cmp.Or(projectID, orgWide), now)
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
	return collect(ctx, tx, func(row pgx.Row) (User, error) {
		var u User
		return u, row.Scan(&u.ID, &u.OrgID, &u.Email, &u.DisplayName, &u.PlatformAdmin, &u.Disabled, &u.ResourceVersion,
			&u.CreatedAt, &u.Roles)
	}, `
		SELECT u.id, COALESCE(u.org_id::TEXT, ''), u.email, u.name, u.platform_admin, u.disabled_at IS NOT NULL,
		u.resource_version, u.created_at,
		       COALESCE((SELECT array_agg(b.role ORDER BY b.role) FROM role_bindings b WHERE b.user_id = u.id
		       AND b.scope = 'org'), ARRAY[]::TEXT[])
		FROM users u
		WHERE u.removed_at IS NULL AND ($1::UUID IS NULL OR u.id = $1::UUID) AND ($2::UUID IS NULL OR u.org_id = $2::UUID)
		AND ($3::UUID IS NULL OR u.id > $3::UUID)
		ORDER BY u.id LIMIT $4`, null(f.id), null(f.orgID), null(page.After), page.Limit)
}

func selectFirstAdmin(ctx context.Context, tx db.Tx) (User, bool, error) {
	var id string
	err := tx.QueryRow(ctx,
		`SELECT id FROM users WHERE platform_admin AND disabled_at IS NULL ORDER BY created_at, id LIMIT 1`).Scan(&id)
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
	err = tx.QueryRow(ctx,
		`SELECT count(*) FROM user_tokens WHERE user_id = $1 AND expires_at > $2 AND revoked_at IS NULL`, userID,
		now).Scan(&n)
	return n, err
}

func revokeTokens(ctx context.Context, tx db.Tx, userID string, now time.Time) (int64, error) {
	tag, err := tx.Exec(ctx,
		`UPDATE user_tokens SET revoked_at = $2 WHERE user_id = $1 AND revoked_at IS NULL AND expires_at > $2`, userID, now)
	return tag.RowsAffected(), err
}

// selectPrincipal is completed by what finds the token. A disabled or removed user has no tokens that count.
const selectPrincipal = `
	SELECT u.id, u.name, COALESCE(u.org_id::TEXT, ''), u.platform_admin, COALESCE(b.role, ''), COALESCE(b.scope, '')
	FROM user_tokens t JOIN users u ON u.id = t.user_id LEFT JOIN role_bindings b ON b.user_id = u.id`

func selectUserByToken(ctx context.Context, tx db.Tx, hash []byte, now time.Time) (Principal, error) {
	rows, err := tx.Query(ctx, selectPrincipal+`
		WHERE t.hash = $1 AND t.expires_at > $2 AND t.revoked_at IS NULL AND u.disabled_at IS NULL AND u.removed_at IS NULL
		ORDER BY b.role, b.scope`, hash, now)
	if err != nil {
		return Principal{}, err
	}
	return principalOf(rows)
}

func principalOf(rows pgx.Rows) (Principal, error) {
	var (
		p = Principal{Type: principal.User}
		b Binding
	)
	into := []any{&p.ID, &p.Name, &p.OrgID, &p.PlatformAdmin, &b.Role, &b.ProjectID}
	_, err := pgx.ForEachRow(rows, into, func() error {
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

// ListUserTokens lists the tokens of the user that count.
func ListUserTokens(ctx context.Context, tx db.Tx, userID string, now time.Time, page Page) ([]UserToken, error) {
	page, err := page.check()
	if err != nil {
		return nil, err
	}
	return collect(ctx, tx, func(row pgx.Row) (UserToken, error) {
		var t UserToken
		return t, row.Scan(&t.ID, &t.UserID, &t.Description, &t.ExpiresAt, &t.CreatedAt)
	}, `
		SELECT id, user_id, description, expires_at, created_at FROM user_tokens
		WHERE user_id = $1 AND expires_at > $2 AND revoked_at IS NULL AND ($3::UUID IS NULL OR id > $3::UUID)
		ORDER BY id LIMIT $4`, userID, now, null(page.After), page.Limit)
}

func revokeToken(ctx context.Context, tx db.Tx, userID, id string, now time.Time) (bool, error) {
	return affects(tx.Exec(ctx, `
		UPDATE user_tokens SET revoked_at = $3 WHERE id = $2 AND user_id = $1 AND revoked_at IS NULL AND expires_at > $3`,
		userID, id, now))
}

func otherAdminExists(ctx context.Context, tx db.Tx, userID string) (exists bool, err error) {
	err = tx.QueryRow(ctx, `
		SELECT EXISTS (SELECT 1 FROM users WHERE platform_admin AND disabled_at IS NULL AND id <> $1)`, userID).Scan(&exists)
	return exists, err
}

// updateUser saves u and returns it with its new resource version.
func updateUser(ctx context.Context, tx db.Tx, u User, now time.Time) (User, error) {
	err := tx.QueryRow(ctx, `
		UPDATE users SET org_id = $2, email = $3, platform_admin = $4, updated_at = $6, resource_version = resource_version +
		1,
		       disabled_at = CASE WHEN $5::BOOL THEN COALESCE(disabled_at, $6) END
		WHERE id = $1 RETURNING resource_version`, u.ID, null(u.OrgID), u.Email, u.PlatformAdmin, u.Disabled,
		now).Scan(&u.ResourceVersion)
	return u, err
}

func markUserRemoved(ctx context.Context, tx db.Tx, userID string, now time.Time) error {
	_, err := tx.Exec(ctx, `UPDATE users SET removed_at = $2 WHERE id = $1`, userID, now)
	return err
}

// deleteBindings takes every role of the scope from the user; of every scope where it is empty.
func deleteBindings(ctx context.Context, tx db.Tx, userID, scope string) error {
	_, err := tx.Exec(ctx, `DELETE FROM role_bindings WHERE user_id = $1 AND ($2 = '' OR scope = $2)`, userID, scope)
	return err
}

// ListProjectRoles lists the users who hold roles in this project only.
func ListProjectRoles(ctx context.Context, tx db.Tx, projectID string, page Page) ([]ProjectRoles, error) {
	page, err := page.check()
	if err != nil {
		return nil, err
	}
	return collect(ctx, tx, func(row pgx.Row) (ProjectRoles, error) {
		var p ProjectRoles
		return p, row.Scan(&p.UserID, &p.Email, &p.DisplayName, &p.Roles)
	}, `
		SELECT u.id, u.email, u.name, array_agg(b.role ORDER BY b.role)
		FROM role_bindings b JOIN users u ON u.id = b.user_id
		WHERE b.scope = $1 AND ($2::UUID IS NULL OR u.id > $2::UUID)
		GROUP BY u.id, u.email, u.name ORDER BY u.id LIMIT $3`, projectID, null(page.After), page.Limit)
}

func selectProjectRolesOf(ctx context.Context, tx db.Tx, projectID, userID string) ([]Role, error) {
	return collect(ctx, tx, func(row pgx.Row) (Role, error) {
		var r Role
		return r, row.Scan(&r)
	}, `SELECT role FROM role_bindings WHERE user_id = $1 AND scope = $2 ORDER BY role`, userID, projectID)
}
