package iam

import (
	"context"
	"crypto/subtle"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	// SessionTokenLifetime is that of a session's access token.
	SessionTokenLifetime = 15 * time.Minute
	// sessionIdle ends a session that is not refreshed, sessionLife every session.
	sessionIdle = 24 * time.Hour
	sessionLife = 7 * 24 * time.Hour

	refreshTokenPrefix = "gpuaas_rt_" //nolint:gosec // a prefix, not a token
	// familyText is the length of the part that all refresh tokens of a session share, 32 bytes in base64. Who has it has
	// had one of them: so an old one is known from a guess.
	familyText   = 43
	maxUserAgent = 256
)

// Session is a login.
type Session struct {
	ID, UserID               string
	UserAgent, SourceAddress string
	CreatedAt, RefreshedAt   time.Time
	ExpiresAt                time.Time
}

// SessionTokens are what a login, and each refresh, gives out.
type SessionTokens struct {
	Session Session
	User    User
	// AccessID is the row of the access token.
	AccessID, Access string
	AccessExpiresAt  time.Time
	Refresh          string
}

// NewSessionTokens makes the tokens of a new session from an address.
func NewSessionTokens(userAgent, sourceAddress string, now time.Time) SessionTokens {
	return SessionTokens{
		Session: Session{
			ID:            db.NewID(),
			UserAgent:     strings.ToValidUTF8(userAgent[:min(len(userAgent), maxUserAgent)], ""),
			SourceAddress: sourceAddress,
			CreatedAt:     now,
			RefreshedAt:   now,
			ExpiresAt:     now.Add(sessionIdle),
		},
		AccessID: db.NewID(), Access: NewUserToken(), AccessExpiresAt: now.Add(SessionTokenLifetime),
		Refresh: refreshTokenPrefix + randomText() + randomText(),
	}
}

// StartSession logs a user in.
func StartSession(ctx context.Context, tx db.Tx, t SessionTokens, user User) (SessionTokens, error) {
	t.User, t.Session.UserID = user, user.ID
	s := t.Session
	if _, err := tx.Exec(ctx, `
		INSERT INTO sessions (id, user_id, family_hash, refresh_hash, user_agent, source_address, created_at, refreshed_at,
		                      expires_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $7, $8)`, s.ID, s.UserID, familyHash(t.Refresh), hashToken(t.Refresh),
		s.UserAgent, s.SourceAddress, s.CreatedAt, s.ExpiresAt); err != nil {
		return SessionTokens{}, err
	}
	return t, insertAccessToken(ctx, tx, t)
}

// sessionRow is a session with what proves its refresh tokens.
type sessionRow struct {
	Session
	RefreshHash []byte
}

const sessionColumns = `s.id, s.user_id, s.user_agent, s.source_address, s.created_at, s.refreshed_at, s.expires_at`

// RefreshSession exchanges a refresh token for new tokens: those of t, of which only the secrets count. An old refresh
// token ends the session, because its successor was given to another caller; reused says so, with the tokens' session
// and user.
func RefreshSession(ctx context.Context, tx db.Tx, refresh string, t SessionTokens) (_ SessionTokens, reused bool,
	_ error,
) {
	if !strings.HasPrefix(refresh, refreshTokenPrefix) || len(refresh) != len(t.Refresh) {
		return SessionTokens{}, false, ErrSessionEnded()
	}
	now := t.Session.RefreshedAt
	row, err := db.SelectOne(ctx, tx, pgx.RowToStructByPos[sessionRow], `
		SELECT `+sessionColumns+`, s.refresh_hash FROM sessions s JOIN users u ON u.id = s.user_id
		WHERE s.family_hash = $1 AND s.revoked_at IS NULL AND s.expires_at > $2 AND u.disabled_at IS NULL
		AND u.removed_at IS NULL`, familyHash(refresh), now)
	if db.IsNoRows(err) {
		return SessionTokens{}, false, ErrSessionEnded()
	}
	if err != nil {
		return SessionTokens{}, false, err
	}
	t.Session = row.Session
	if t.User, err = GetUser(ctx, tx, row.UserID); err != nil {
		return SessionTokens{}, false, err
	}
	if subtle.ConstantTimeCompare(row.RefreshHash, hashToken(refresh)) != 1 {
		t.Access, t.Refresh = "", ""
		return t, true, EndSession(ctx, tx, row.ID, now)
	}
	t.Refresh = refresh[:len(refreshTokenPrefix)+familyText] + t.Refresh[len(refreshTokenPrefix)+familyText:]
	t.Session.RefreshedAt, t.Session.ExpiresAt = now, now.Add(sessionIdle)
	if end := row.CreatedAt.Add(sessionLife); t.Session.ExpiresAt.After(end) {
		t.Session.ExpiresAt = end
	}
	if t.AccessExpiresAt.After(t.Session.ExpiresAt) {
		t.AccessExpiresAt = t.Session.ExpiresAt
	}
	if _, err := tx.Exec(ctx, `UPDATE sessions SET refresh_hash = $2, refreshed_at = $3, expires_at = $4 WHERE id = $1`,
		row.ID, hashToken(t.Refresh), now, t.Session.ExpiresAt); err != nil {
		return SessionTokens{}, false, err
	}
	return t, false, insertAccessToken(ctx, tx, t)
}

// ListSessions lists the logins of the user that count.
func ListSessions(ctx context.Context, tx db.Tx, userID string, now time.Time, page db.Page) ([]Session, error) {
	return selectPage[Session](ctx, tx, page, `
		SELECT `+sessionColumns+` FROM sessions s
		WHERE s.user_id = $1 AND s.expires_at > $2 AND s.revoked_at IS NULL AND ($3::UUID IS NULL OR s.id > $3::UUID)
		ORDER BY s.id LIMIT $4`, userID, now)
}

// CheckSession reports NotFound unless the login is one of the user and counts.
func CheckSession(ctx context.Context, tx db.Tx, userID, id string, now time.Time) error {
	if !db.IsID(id) {
		return ErrNotFound()
	}
	live, err := db.Value[bool](ctx, tx, `SELECT EXISTS (SELECT 1 FROM sessions
		WHERE id = $1 AND user_id = $2 AND revoked_at IS NULL AND expires_at > $3)`, id, userID, now)
	if err == nil && !live {
		err = ErrNotFound()
	}
	return err
}

// EndSession ends a login with its tokens.
func EndSession(ctx context.Context, tx db.Tx, id string, now time.Time) error {
	if _, err := tx.Exec(ctx, `UPDATE sessions SET revoked_at = $2 WHERE id = $1`, id, now); err != nil {
		return err
	}
	_, err := tx.Exec(ctx,
		`UPDATE user_tokens SET revoked_at = $2 WHERE session_id = $1 AND revoked_at IS NULL AND expires_at > $2`, id, now)
	return err
}

// endOtherSessions ends all logins of a user but one.
func endOtherSessions(ctx context.Context, tx db.Tx, userID, keep string, now time.Time) error {
	if _, err := tx.Exec(ctx, `UPDATE sessions SET revoked_at = $3
		WHERE user_id = $1 AND id::TEXT <> $2 AND revoked_at IS NULL AND expires_at > $3`, userID, keep, now); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, `UPDATE user_tokens SET revoked_at = $3
		WHERE user_id = $1 AND session_id IS NOT NULL AND session_id::TEXT <> $2 AND revoked_at IS NULL
		AND expires_at > $3`, userID, keep, now)
	return err
}

func insertAccessToken(ctx context.Context, tx db.Tx, t SessionTokens) error {
	_, err := tx.Exec(ctx, `
		INSERT INTO user_tokens (id, user_id, session_id, hash, description, expires_at, created_at)
		VALUES ($1, $2, $3, $4, '', $5, $6)`,
		t.AccessID, t.User.ID, t.Session.ID, hashToken(t.Access), t.AccessExpiresAt, t.Session.RefreshedAt)
	return err
}

// familyHash identifies the session of a refresh token of full length.
func familyHash(refresh string) []byte {
	return hashToken(refresh[:len(refreshTokenPrefix)+familyText])
}

// ErrSessionEnded answers a refresh token that does not count.
func ErrSessionEnded() *fault.Error {
	return fault.New(fault.Unauthenticated, codeSessionEnded, "The session has ended: log in again.", nil).Permanent()
}
