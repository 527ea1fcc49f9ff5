package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// The audit actions of sessions: no permission stands before them, the proof is the permission.
const (
	actionLogin   = "iam.session.login"
	actionRefresh = "iam.session.refresh"
	actionLogout  = "iam.session.logout"
)

// LoginInput is what a person logs in with.
type LoginInput struct {
	Email, Password, Code string
	UserAgent             string
}

// LoginRefusedError names the account that a login was refused for, for the audit trail and not for the answer.
type LoginRefusedError struct {
	UserID, OrgID string
	cause         error
}

func (e *LoginRefusedError) Error() string { return e.cause.Error() }

// Unwrap returns the fault.
func (e *LoginRefusedError) Unwrap() error { return e.cause }

// Login starts a session for an e-mail address and its password. Refusals are alike, and take as long, whatever was
// wrong.
func (s *Service) Login(ctx context.Context, m Meta, in LoginInput) (iam.SessionTokens, error) {
	found, err := db.Query(ctx, s.DB, func(tx db.Tx) (iam.Password, error) { return iam.PasswordOf(ctx, tx, in.Email) })
	if err != nil {
		return iam.SessionTokens{}, err
	}
	matches := false
	if err := s.hash(ctx, func() { matches = found.Matches(in.Password) }); err != nil {
		return iam.SessionTokens{}, err
	}
	tokens, err := iam.SessionTokens{}, error(iam.ErrLoginRefused())
	if matches {
		fresh := iam.NewSessionTokens(in.UserAgent, m.SourceAddress, m.Now)
		tokens, err = run(ctx, s, access.Anyone, func(tx db.Tx, _ access.Nothing) (iam.SessionTokens, error) {
			user, err := iam.CheckLogin(ctx, tx, s.Sealer, found, in.Code, m.Now)
			if err != nil {
				return iam.SessionTokens{}, err
			}
			return m.startSession(ctx, tx, fresh, user)
		})
	}
	if fault.Is(err, fault.Unauthenticated) {
		err = &LoginRefusedError{UserID: found.UserID, OrgID: found.OrgID, cause: err}
	}
	return tokens, err
}

// hash does one hash of a password at a time: each takes 64 MiB.
func (s *Service) hash(ctx context.Context, do func()) error {
	unlock, err := s.hashing.Lock(ctx, "")
	if err != nil {
		return db.Cancelled(err)
	}
	defer unlock()
	do()
	return nil
}

// startSession logs a user in, with an audit row.
func (m Meta) startSession(ctx context.Context, tx db.Tx, fresh iam.SessionTokens,
	user iam.User,
) (iam.SessionTokens, error) {
	tokens, err := iam.StartSession(ctx, tx, fresh, user)
	if err != nil {
		return iam.SessionTokens{}, err
	}
	return tokens, m.auditSession(ctx, tx, actionLogin, tokens)
}

// RefreshSession exchanges a refresh token for new tokens. An old refresh token ends the session: two have it, and one
// of them stole it.
func (s *Service) RefreshSession(ctx context.Context, m Meta, refresh string) (iam.SessionTokens, error) {
	fresh := iam.NewSessionTokens("", "", m.Now)
	tokens, err := onceSealed(ctx, s, m, s.Sealer, access.Anyone, func(tx db.Tx,
		_ access.Nothing,
	) (iam.SessionTokens, error) {
		tokens, reused, err := iam.RefreshSession(ctx, tx, refresh, fresh)
		switch {
		case err != nil:
			return iam.SessionTokens{}, err
		case reused:
			return iam.SessionTokens{}, m.recordSessionEnd(ctx, tx, tokens.User.ID, tokens.User.OrgID, tokens.Session.ID,
				"refresh_token_reused")
		}
		return tokens, m.auditSession(ctx, tx, actionRefresh, tokens)
	})
	if err == nil && tokens.Access == "" {
		// Its end is committed.
		err = iam.ErrSessionEnded()
	}
	return tokens, err
}

// RevokeSession ends a session of the caller. Revoking twice is NotFound.
func (s *Service) RevokeSession(ctx context.Context, m Meta, id string) error {
	check := func(ctx context.Context, tx db.Tx) (access.Nothing, error) {
		return access.Nothing{}, iam.CheckSession(ctx, tx, m.Principal.ID, id, m.Now)
	}
	return do(ctx, s, check, func(tx db.Tx, _ access.Nothing) error {
		if err := iam.EndSession(ctx, tx, id, m.Now); err != nil {
			return err
		}
		return m.recordSessionEnd(ctx, tx, m.Principal.ID, m.Principal.OrgID, id, "revoked")
	})
}

// Logout ends the session that the caller's token belongs to.
func (s *Service) Logout(ctx context.Context, m Meta) error {
	if m.Principal.SessionID == "" {
		return fault.New(fault.Conflict, codeNoSession, "This credential belongs to no session; personal tokens are "+
			"revoked.", nil).Permanent()
	}
	return s.RevokeSession(ctx, m, m.Principal.SessionID)
}

func (m Meta) auditSession(ctx context.Context, tx db.Tx, action string, t iam.SessionTokens) error {
	by := m.by()
	by.Actor = principal.Actor{Type: principal.User, ID: t.User.ID}
	return change.Audit(ctx, tx, by, change.Entry{
		Action:       action,
		ResourceType: resourceSession,
		ResourceID:   t.Session.ID,
		OrgID:        t.User.OrgID,
		After:        map[string]any{"user_agent": t.Session.UserAgent, "expires_at": t.Session.ExpiresAt},
	})
}

// sessionEndedVersion follows version 1, the session as it began.
const sessionEndedVersion = 2

func (m Meta) recordSessionEnd(ctx context.Context, tx db.Tx, userID, orgID, id, reason string) error {
	return change.Record(ctx, tx, m.by(), change.Entry{
		Event:        "iam.session.revoked",
		Action:       actionLogout,
		ResourceType: resourceSession,
		ResourceID:   id,
		Version:      sessionEndedVersion,
		OrgID:        orgID,
		Reason:       reason,
		Data:         map[string]any{"reason": reason},
		Before:       map[string]any{"user_id": userID},
	})
}
