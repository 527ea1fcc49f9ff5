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
	u.Email = strings.ToLower(u.Email)
	if len(u.Email) > maxEmail || !regexp.MustCompile(`^[^@\s]+@[^@\s]+$`).MatchString(u.Email) {
		return User{}, invalid().WithField("/email", "is no e-mail address")
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
	roles, err := checkRoles(u.Roles, Role.ForUser, orgRoles)
	if err != nil {
		return User{}, err
	}
	u.Roles, u.ResourceVersion = roles, 1
	if u.OrgID != "" {
		if err := CheckQuota(ctx, tx, u.OrgID, QuotaUsers, u.CreatedAt); err != nil {
			return User{}, err
		}
	}
	made, err := insertUser(ctx, tx, u)
	if err != nil {
		return User{}, err
	}
	if !made {
		return User{}, taken("user", "/email")
	}
	return u, insertBindings(ctx, tx, u.ID, u.Roles, "", u.CreatedAt)
}

// GetUser finds a user.
func GetUser(ctx context.Context, tx db.Tx, id string) (User, error) {
	if !db.IsID(id) {
		return User{}, ErrNotFound()
	}
	users, err := selectUsers(ctx, tx, userFilter{id: id}, Page{Limit: 1})
	if err != nil {
		return User{}, err
	}
	if len(users) == 0 {
		return User{}, ErrNotFound()
	}
	return users[0], nil
}

// ListUsers lists users, of one org where orgID is not empty.
func ListUsers(ctx context.Context, tx db.Tx, orgID string, page Page) ([]User, error) {
	page, err := page.check()
	if err != nil {
		return nil, err
	}
	if orgID != "" && !db.IsID(orgID) {
		return nil, nil
	}
	return selectUsers(ctx, tx, userFilter{orgID: orgID}, page)
}

// NewUserToken makes a token's text. It is given out once; the database keeps its SHA-256.
func NewUserToken() string {
	b := make([]byte, userTokenBytes)
	_, _ = rand.Read(b) // never fails; it ends the program
	return userTokenPrefix + base64.RawURLEncoding.EncodeToString(b)
}

// CreateUserToken records a token made by NewUserToken.
func CreateUserToken(ctx context.Context, tx db.Tx, t UserToken, text string) error {
	life := t.ExpiresAt.Sub(t.CreatedAt)
	if life < minTokenLifetime || life > maxTokenLifetime {
		return invalid().WithHint("/expires_in_seconds", "is out of range", "60 to 31536000")
	}
	if err := below(ctx, tx, func(ctx context.Context, tx db.Tx, id string) (int, error) {
		return countLiveTokens(ctx, tx, id, t.CreatedAt)
	},
		t.UserID, maxLiveTokensPerUser, "tokens of this user"); err != nil {
		return err
	}
	return insertUserToken(ctx, tx, t, hashToken(text))
}

func hashToken(text string) []byte {
	sum := sha256.Sum256([]byte(text))
	return sum[:]
}
