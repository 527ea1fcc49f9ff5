package iam

import (
	"context"
	"strings"
	"time"
	"unicode"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Identity is a person as an OpenID Connect provider knows it.
type Identity struct {
	Issuer, Subject string
	// Email is empty unless the provider has verified it.
	Email, DisplayName string
	// OrgSlug is the org whose members have addresses like Email; empty without such a rule.
	OrgSlug string
}

// ExternalLogin is a login at an identity provider that is under way.
type ExternalLogin struct {
	// Handle is known to the caller that began it; the database keeps its SHA-256.
	Handle string
	// Secret is what the hub needs to finish it.
	Secret    []byte
	ExpiresAt time.Time
}

// NewHandle makes the handle of a login.
func NewHandle() string { return randomText() }

// StartExternalLogin keeps a login, its secret sealed.
func StartExternalLogin(ctx context.Context, tx db.Tx, sealer Sealer, l ExternalLogin, now time.Time) error {
	if _, err := tx.Exec(ctx, `DELETE FROM external_logins WHERE expires_at < $1`, now); err != nil {
		return err
	}
	hash := hashToken(l.Handle)
	sealed, err := sealer.Seal(l.Secret, hash)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `INSERT INTO external_logins (handle_hash, sealed_secret, expires_at) VALUES ($1, $2, $3)`,
		hash, sealed, l.ExpiresAt)
	return err
}

// ExternalLoginSecret returns the secret of a login that is under way.
func ExternalLoginSecret(ctx context.Context, tx db.Tx, sealer Sealer, handle string, now time.Time) ([]byte, error) {
	hash := hashToken(handle)
	sealed, err := db.Value[[]byte](ctx, tx,
		`SELECT sealed_secret FROM external_logins WHERE handle_hash = $1 AND expires_at > $2`, hash, now)
	if db.IsNoRows(err) {
		return nil, errExternalLoginEnded()
	}
	if err != nil {
		return nil, err
	}
	return sealer.Open(sealed, hash)
}

// EndExternalLogin lets a login count once.
func EndExternalLogin(ctx context.Context, tx db.Tx, handle string) error {
	ended, err := affects(tx.Exec(ctx, `DELETE FROM external_logins WHERE handle_hash = $1`, hashToken(handle)))
	if err == nil && !ended {
		err = errExternalLoginEnded()
	}
	return err
}

// cleaned is an identity as the rows can have it: the provider's texts may hold any character, and U+0000 fits in no
// row. A subject or address with one is nobody's.
func (id Identity) cleaned() (Identity, error) {
	if strings.ContainsRune(id.Subject+id.Email, 0) {
		return Identity{}, errNoUser()
	}
	id.DisplayName = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return -1
		}
		return r
	}, id.DisplayName)
	return id, nil
}

// UserOfIdentity finds the user of an identity. A new identity becomes a user by an open invitation of its verified
// address, or as a member of the org that the address belongs to by rule; made says so. Where there is a rule, only
// that org's invitations count. userID is a fresh id.
func UserOfIdentity(ctx context.Context, tx db.Tx, id Identity, userID string, now time.Time) (_ User, made bool,
	_ error,
) {
	id, err := id.cleaned()
	if err != nil {
		return User{}, false, err
	}
	known, err := db.Value[string](ctx, tx,
		`SELECT user_id FROM user_identities WHERE issuer = $1 AND subject = $2`, id.Issuer, id.Subject)
	if err == nil {
		user, err := GetUser(ctx, tx, known)
		if err == nil && user.Disabled {
			err = errNoUser()
		}
		return user, false, err
	}
	if !db.IsNoRows(err) {
		return User{}, false, err
	}
	user, err := newUserOf(ctx, tx, id, now)
	if err != nil {
		return User{}, false, err
	}
	user.ID, user.CreatedAt = userID, now
	if user, err = CreateUser(ctx, tx, user); err != nil {
		return User{}, false, err
	}
	_, err = tx.Exec(ctx, `INSERT INTO user_identities (issuer, subject, user_id, created_at) VALUES ($1, $2, $3, $4)`,
		id.Issuer, id.Subject, user.ID, now)
	return user, true, err
}

// newUserOf is the user that an identity becomes.
func newUserOf(ctx context.Context, tx db.Tx, id Identity, now time.Time) (User, error) {
	email, err := checkEmail(id.Email)
	if err != nil {
		return User{}, errNoUser()
	}
	user := User{Email: email, DisplayName: id.DisplayName}
	if n := len([]rune(user.DisplayName)); n == 0 || n > maxName {
		user.DisplayName = strings.ToValidUTF8(email[:min(len(email), maxName)], "")
	}
	if id.OrgSlug != "" {
		user.OrgID, err = db.Value[string](ctx, tx, `SELECT id FROM orgs WHERE slug = $1`, id.OrgSlug)
		if db.IsNoRows(err) {
			err = errNoUser()
		}
		if err != nil {
			return User{}, err
		}
	}
	// Invitations of other orgs do not count for an address that the rule gives to an org.
	i, err := openInvitation(ctx, tx, "i.email", email, user.OrgID, now)
	switch {
	case err == nil:
		user.OrgID, user.Roles = i.OrgID, i.Roles
		_, err = tx.Exec(ctx, `UPDATE invitations SET ended_at = $2 WHERE id = $1`, i.ID, now)
	case !db.IsNoRows(err):
	case user.OrgID == "":
		err = errNoUser()
	default:
		err = nil
	}
	return user, err
}

func errNoUser() *fault.Error {
	return fault.New(fault.Unauthenticated, codeIdentityUnknown, "You are no user here, or were disabled: ask an admin "+
		"of your org to invite your e-mail address.", nil).Permanent()
}

func errExternalLoginEnded() *fault.Error {
	return fault.New(fault.Unauthenticated, codeExternalLoginEnded, "This login has ended: begin again.", nil).Permanent()
}
