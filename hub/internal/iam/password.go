package iam

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/crypto/argon2"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// The second recommended option of RFC 9106, section 4.
const (
	argonPasses    = 3
	argonMemoryKiB = 64 << 10
	argonThreads   = 4
	argonSaltBytes = 16
	argonKeyBytes  = 32
)

const (
	minPassword = 12
	maxPassword = 256
	phcFormat   = "$argon2id$v=19$m=%d,t=%d,p=%d$"
)

// Password is what a user logs in with. The zero value is nobody's; no password matches it.
type Password struct {
	UserID, OrgID string
	// Hash is a PHC string.
	Hash       string
	SealedTOTP []byte
	// TOTPStep is that of the newest code that was used.
	TOTPStep int64
}

// CheckPassword refuses a password that is too short to resist guessing.
func CheckPassword(password string) error {
	if n := len([]rune(password)); n < minPassword || n > maxPassword {
		return invalid().WithHint("/password", "is too short or too long", "12 to 256 characters")
	}
	return nil
}

// HashPassword takes a tenth of a second and 64 MiB.
func HashPassword(password string) string {
	salt := make([]byte, argonSaltBytes)
	_, _ = rand.Read(salt) // never fails; it ends the program
	key := argon2.IDKey([]byte(password), salt, argonPasses, argonMemoryKiB, argonThreads, argonKeyBytes)
	return fmt.Sprintf(phcFormat, argonMemoryKiB, argonPasses, argonThreads) +
		base64.RawStdEncoding.EncodeToString(salt) + "$" + base64.RawStdEncoding.EncodeToString(key)
}

// Matches compares as long as HashPassword takes, whether the user exists or not.
func (p Password) Matches(password string) bool {
	salt, want := make([]byte, argonSaltBytes), make([]byte, argonKeyBytes)
	memory, passes, threads := uint32(argonMemoryKiB), uint32(argonPasses), uint8(argonThreads)
	if parts := strings.Split(p.Hash, "$"); len(parts) == 6 {
		var saltErr, wantErr error
		_, err := fmt.Sscanf(p.Hash, phcFormat, &memory, &passes, &threads)
		salt, saltErr = base64.RawStdEncoding.DecodeString(parts[4])
		want, wantErr = base64.RawStdEncoding.DecodeString(parts[5])
		if errors.Join(err, saltErr, wantErr) != nil {
			return false
		}
	}
	key := argon2.IDKey([]byte(password), salt, passes, memory, threads, argonKeyBytes)
	return subtle.ConstantTimeCompare(key, want) == 1 && p.Hash != ""
}

// PasswordOf finds the password of an active user; the zero value where there is none.
func PasswordOf(ctx context.Context, tx db.Tx, email string) (Password, error) {
	p, err := db.SelectOne(ctx, tx, pgx.RowToStructByPos[Password], `
		SELECT u.id, COALESCE(u.org_id::TEXT, ''), w.password_hash, w.sealed_totp_secret, w.totp_step
		FROM users u JOIN user_passwords w ON w.user_id = u.id
		WHERE u.email = $1 AND u.disabled_at IS NULL AND u.removed_at IS NULL`, FoldEmail(email))
	if db.IsNoRows(err) {
		return Password{}, nil
	}
	return p, err
}

// PasswordOfUser is PasswordOf for a user's id.
func PasswordOfUser(ctx context.Context, tx db.Tx, userID string) (Password, error) {
	user, err := GetUser(ctx, tx, userID)
	if fault.Is(err, fault.NotFound) {
		return Password{}, nil
	}
	if err != nil {
		return Password{}, err
	}
	return PasswordOf(ctx, tx, user.Email)
}

// CheckLogin returns the user whose password p matched before, unless it was changed since. Where the user has one-time
// codes, code must be one that was not used yet; it counts as used. Every refusal is the same.
func CheckLogin(ctx context.Context, tx db.Tx, sealer Sealer, p Password, code string, now time.Time) (User, error) {
	step := p.TOTPStep
	if p.SealedTOTP != nil {
		secret, err := sealer.Open(p.SealedTOTP, totpAAD(p.UserID))
		if err != nil {
			return User{}, fault.New(fault.Internal, codeTokenKeySealed, "The secret of one-time codes cannot be opened: "+
				"restore the hub's key file that belongs to this database.", err)
		}
		if step = totpStep(secret, code, now); step <= p.TOTPStep {
			return User{}, ErrLoginRefused()
		}
	}
	current, err := affects(tx.Exec(ctx, `
		UPDATE user_passwords SET totp_step = $3
		WHERE user_id = $1 AND password_hash = $2 AND totp_step = $4 AND EXISTS
		(SELECT 1 FROM users WHERE id = $1 AND disabled_at IS NULL AND removed_at IS NULL)`,
		p.UserID, p.Hash, step, p.TOTPStep))
	if err == nil && !current {
		err = ErrLoginRefused()
	}
	if err != nil {
		return User{}, err
	}
	return GetUser(ctx, tx, p.UserID)
}

// ErrLoginRefused answers a wrong address, password and one-time code alike.
func ErrLoginRefused() *fault.Error {
	return fault.New(fault.Unauthenticated, codeLoginRefused, "The e-mail address, the password or the one-time code is "+
		"not right.", nil).Permanent()
}

// ErrPasswordRefused answers a wrong current password and one-time code alike.
func ErrPasswordRefused() *fault.Error {
	return fault.New(fault.Forbidden, codePasswordRefused, "The current password or the one-time code is not right.",
		nil).Permanent()
}

// PasswordChange is what a user changes of a login.
type PasswordChange struct {
	// Hash is of the new password; empty where it stays.
	Hash string
	// TOTP are the new one-time codes, and RemoveTOTP ends them; nil and false leave them as they are.
	TOTP       *TOTP
	RemoveTOTP bool
}

// ChangePassword changes the login of a user, whom CheckLogin has returned, and ends all sessions of the user but one.
func ChangePassword(ctx context.Context, tx db.Tx, sealer Sealer, u User, c PasswordChange, keepSession string,
	now time.Time,
) (User, error) {
	if c.Hash != "" {
		if _, err := tx.Exec(ctx, `UPDATE user_passwords SET password_hash = $2, updated_at = $3 WHERE user_id = $1`, u.ID,
			c.Hash, now); err != nil {
			return User{}, err
		}
	}
	if c.TOTP != nil || c.RemoveTOTP {
		var sealed []byte
		var step int64
		if c.TOTP != nil {
			var err error
			if sealed, step, err = c.TOTP.enroll(sealer, u.ID, now); err != nil {
				return User{}, err
			}
		}
		if _, err := tx.Exec(ctx, `UPDATE user_passwords SET sealed_totp_secret = $2, totp_step = $3, updated_at = $4
			WHERE user_id = $1`, u.ID, sealed, step, now); err != nil {
			return User{}, err
		}
	}
	if err := endOtherSessions(ctx, tx, u.ID, keepSession, now); err != nil {
		return User{}, err
	}
	return updateUser(ctx, tx, u, now)
}

// setPassword replaces what the user logs in with; totp is nil without one-time codes.
func setPassword(ctx context.Context, tx db.Tx, sealer Sealer, userID, hash string, totp *TOTP, now time.Time) error {
	var sealed []byte
	var step int64
	if totp != nil {
		var err error
		if sealed, step, err = totp.enroll(sealer, userID, now); err != nil {
			return err
		}
	}
	_, err := tx.Exec(ctx, `
		INSERT INTO user_passwords (user_id, password_hash, sealed_totp_secret, totp_step, updated_at)
		VALUES ($1, $2, $3, $4, $5)
		ON CONFLICT (user_id) DO UPDATE SET password_hash = excluded.password_hash, totp_step = excluded.totp_step,
			sealed_totp_secret = excluded.sealed_totp_secret, updated_at = excluded.updated_at`,
		userID, hash, sealed, step, now)
	return err
}
