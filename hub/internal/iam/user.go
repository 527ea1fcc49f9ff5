package iam

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"regexp"
	"strings"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	// userTokenPrefix lets secret scanners and people recognise a leaked token.
	userTokenPrefix = "gpuaas_ut_" //nolint:gosec // a prefix, not a token
	// userTokenBytes of randomness make guessing hopeless, so that a plain SHA-256 suffices as what is stored.
	userTokenBytes = 32

	// DefaultTokenLifetime is that of a user token whose maker names none.
	DefaultTokenLifetime = 30 * 24 * time.Hour
	minTokenLifetime     = time.Minute
	maxTokenLifetime     = 365 * 24 * time.Hour
	maxEmail             = 254
)

// User is a person.
type User struct {
	ID string
	// OrgID is empty only for a platform admin that belongs to no org.
	OrgID              string
	Email, DisplayName string
	PlatformAdmin      bool
	// Roles are held in the whole org.
	Roles []Role
	// Disabled refuses all tokens of the user.
	Disabled bool
	// ResourceVersion counts the changes of the user and of its roles, its making included.
	ResourceVersion int64
	CreatedAt       time.Time
}

// UserToken is the record of a token; the token itself is known to its owner only.
type UserToken struct {
	ID, UserID, Description string
	ExpiresAt, CreatedAt    time.Time
}

// CreateUser makes a user. A user of an org without a role is a member.
func CreateUser(ctx context.Context, tx db.Tx, u User) (User, error) {
	var err error
	if u.Email, err = checkEmail(u.Email); err != nil {
		return User{}, err
	}
	if n := len([]rune(u.DisplayName)); n == 0 || n > maxName {
		return User{}, invalid().WithHint("/display_name", "is empty or too long", "1 to 128 characters")
	}
	switch {
	case u.OrgID == "" && !u.PlatformAdmin:
		return User{}, invalid().WithHint("/org_id", "is required", "only a platform admin may belong to no org")
	case u.OrgID == "" && len(u.Roles) > 0:
		return User{}, invalid().WithHint("/roles", "roles are held in an org", "name an org, or leave the roles out")
	case u.OrgID != "":
		if _, err := GetOrg(ctx, tx, u.OrgID); err != nil {
			if fault.Is(err, fault.NotFound) {
				return User{}, invalid().WithField("/org_id", "there is no such org")
			}
			return User{}, err
		}
	}
	if u.OrgID != "" && len(u.Roles) == 0 {
		u.Roles = []Role{OrgMember}
	}
	if u.Roles, err = checkRoles(u.Roles, Role.ForUser, orgRoles); err != nil {
		return User{}, err
	}
	u.ResourceVersion = 1
	if u.OrgID != "" {
		if err := CheckQuota(ctx, tx, u.OrgID, QuotaUsers, u.CreatedAt); err != nil {
			return User{}, err
		}
	}
	made, err := affects(tx.Exec(ctx, `
		INSERT INTO users (id, org_id, email, name, platform_admin, created_at, updated_at)
		VALUES ($1, $2, $3, $4, $5, $6, $6)
		ON CONFLICT (email) DO NOTHING`, u.ID, db.OrNull(u.OrgID), u.Email, u.DisplayName, u.PlatformAdmin, u.CreatedAt))
	if err != nil {
		return User{}, err
	}
	if !made {
		return User{}, taken("user", "/email")
	}
	return u, insertBindings(ctx, tx, u.ID, u.Roles, "", u.CreatedAt)
}

// FoldEmail returns an e-mail address as the rows have it: in lower case, as far as it is ASCII. Unicode folds letters
// into ASCII's, such as the Kelvin sign into a k, which would make two addresses one.
func FoldEmail(email string) string {
	return strings.Map(func(r rune) rune {
		if 'A' <= r && r <= 'Z' {
			r += 'a' - 'A'
		}
		return r
	}, email)
}

// checkEmail returns a well-formed e-mail address as the rows have it.
func checkEmail(email string) (string, error) {
	email = FoldEmail(email)
	if len(email) > maxEmail || !regexp.MustCompile(`^[^@\s]+@[^@\s]+$`).MatchString(email) {
		return "", invalid().WithField("/email", "is no e-mail address")
	}
	return email, nil
}

// GetUser finds a user.
func GetUser(ctx context.Context, tx db.Tx, id string) (User, error) {
	return selectByID[User](ctx, tx, `SELECT `+userColumns+` WHERE u.removed_at IS NULL AND u.id = $1`, id)
}

// ListUsers lists users, of one org where orgID is not empty.
func ListUsers(ctx context.Context, tx db.Tx, orgID string, page db.Page) ([]User, error) {
	if orgID != "" && !db.IsID(orgID) {
		return nil, nil
	}
	return selectPage[User](ctx, tx, page, `
		SELECT `+userColumns+`
		WHERE u.removed_at IS NULL AND ($1::UUID IS NULL OR u.org_id = $1::UUID) AND ($2::UUID IS NULL OR u.id > $2::UUID)
		ORDER BY u.id LIMIT $3`, db.OrNull(orgID))
}

// NewUserToken makes a token's text. It is given out once; the database keeps its SHA-256.
func NewUserToken() string { return userTokenPrefix + randomText() }

func randomText() string {
	b := make([]byte, userTokenBytes)
	_, _ = rand.Read(b) // never fails; it ends the program
	return base64.RawURLEncoding.EncodeToString(b)
}

// CreateUserToken records a token made by NewUserToken.
func CreateUserToken(ctx context.Context, tx db.Tx, t UserToken, text string) error {
	life := t.ExpiresAt.Sub(t.CreatedAt)
	if life < minTokenLifetime || life > maxTokenLifetime {
		return invalid().WithHint("/expires_in_seconds", "is out of range", "60 to 31536000")
	}
	if err := below(ctx, tx, maxLiveTokensPerUser, "tokens of this user",
		`SELECT count(*) FROM user_tokens
		WHERE user_id = $1 AND expires_at > $2 AND revoked_at IS NULL AND session_id IS NULL`, t.UserID,
		t.CreatedAt); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, `
		INSERT INTO user_tokens (id, user_id, hash, description, expires_at, created_at) VALUES ($1, $2, $3, $4, $5, $6)`,
		t.ID, t.UserID, hashToken(text), t.Description, t.ExpiresAt, t.CreatedAt)
	return err
}

// ListUserTokens lists the tokens of the user that count.
func ListUserTokens(ctx context.Context, tx db.Tx, userID string, now time.Time, page db.Page) ([]UserToken, error) {
	return selectPage[UserToken](ctx, tx, page, `
		SELECT id, user_id, description, expires_at, created_at FROM user_tokens
		WHERE user_id = $1 AND expires_at > $2 AND revoked_at IS NULL AND session_id IS NULL
		AND ($3::UUID IS NULL OR id > $3::UUID)
		ORDER BY id LIMIT $4`, userID, now)
}

// userPrincipalColumns of users u, with userBindings and the token t that the user presents.
const userPrincipalColumns = `u.id, u.name, COALESCE(u.org_id::TEXT, ''), u.platform_admin, u.disabled_at IS NOT NULL,
	COALESCE(b.role, ''), COALESCE(b.scope, ''), c.permissions, COALESCE(t.session_id::TEXT, '')`

// userBindings joins what userPrincipalColumns names beside the user.
const userBindings = `LEFT JOIN role_bindings b ON b.user_id = u.id LEFT JOIN custom_roles c ON c.id = b.custom_role_id`

const selectByToken = `SELECT ` + userPrincipalColumns + `, t.expires_at
	FROM user_tokens t JOIN users u ON u.id = t.user_id ` + userBindings + `
	WHERE t.hash = $1 AND t.expires_at > $2 AND t.revoked_at IS NULL AND u.disabled_at IS NULL AND u.removed_at IS NULL`

// selectUserByToken finds the user of a token that counts, and until when it does. A disabled or removed user has none.
func selectUserByToken(ctx context.Context, tx db.Tx, hash []byte, now time.Time) (p Principal, until time.Time,
	err error,
) {
	p, err = selectUserPrincipal(ctx, tx, &until, selectByToken, hash, now)
	if err == nil && p.ID == "" {
		err = ErrUnauthenticated()
	}
	return p, until, err
}

// selectUserPrincipal reads the rows of one user, one for each role; without a row the ID is empty. until is where the
// token's end goes, which comes last in a row; nil where the statement has none.
func selectUserPrincipal(ctx context.Context, tx db.Tx, until *time.Time, sql string, args ...any) (Principal, error) {
	p, b := Principal{Type: principal.User}, Binding{}
	into := []any{
		&p.ID, &p.Name, &p.OrgID, &p.PlatformAdmin, &p.Disabled, &b.Role, &b.ProjectID, &b.Permissions, &p.SessionID,
	}
	if until != nil {
		into = append(into, until)
	}
	err := db.ForEach(ctx, tx, into, func() {
		if b.ProjectID == orgWide {
			b.ProjectID = ""
		}
		if b.Role != "" {
			p.Bindings = append(p.Bindings, b)
		}
	}, sql, args...)
	if err != nil {
		return Principal{}, err
	}
	p.sortBindings()
	return p, nil
}

func hashToken(text string) []byte {
	sum := sha256.Sum256([]byte(text))
	return sum[:]
}
