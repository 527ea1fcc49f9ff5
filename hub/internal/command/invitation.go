package command

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
)

// actionAccept is audited, though no permission stands before it: the invitation is the permission.
const actionAccept = "iam.invitation.accept"

// CreateInvitationInput is what the caller chooses.
type CreateInvitationInput struct {
	OrgID, Email string
	Roles        []iam.Role
	// Lifetime of 0 means iam.DefaultInvitationLifetime.
	Lifetime time.Duration
}

// InvitationWithToken holds the token, which is shown this once.
type InvitationWithToken struct {
	Invitation iam.Invitation
	Token      string
}

// CreateInvitation invites an e-mail address into an org, in place of its open invitations.
func (s *Service) CreateInvitation(ctx context.Context, m Meta, in CreateInvitationInput) (InvitationWithToken, error) {
	if in.Lifetime == 0 {
		in.Lifetime = iam.DefaultInvitationLifetime
	}
	wanted := iam.Invitation{
		ID:        db.NewID(),
		OrgID:     in.OrgID,
		Email:     in.Email,
		Roles:     in.Roles,
		InvitedBy: m.Principal.ID,
		CreatedAt: m.Now,
		ExpiresAt: m.Now.Add(in.Lifetime),
	}
	token := iam.NewInvitationToken()
	check := access.Org(m.Principal, iam.UserManage, in.OrgID)
	return onceSealed(ctx, s, m, s.Sealer, check, func(tx db.Tx, _ iam.Org) (InvitationWithToken, error) {
		made, ended, err := iam.CreateInvitation(ctx, tx, m.Principal, wanted, token)
		if err != nil {
			return InvitationWithToken{}, err
		}
		for _, i := range ended {
			if err := m.recordInvitation(ctx, tx, "iam.invitation.revoked", i, 2); err != nil {
				return InvitationWithToken{}, err
			}
		}
		return InvitationWithToken{Invitation: made, Token: token},
			m.recordInvitation(ctx, tx, "iam.invitation.created", made, 1)
	})
}

// RevokeInvitation ends an open invitation. Revoking twice is NotFound.
func (s *Service) RevokeInvitation(ctx context.Context, m Meta, orgID, id string) error {
	return do(ctx, s, access.Org(m.Principal, iam.UserManage, orgID), func(tx db.Tx, org iam.Org) error {
		ended, err := iam.RevokeInvitation(ctx, tx, org.ID, id, m.Now)
		if err != nil {
			return err
		}
		return m.recordInvitation(ctx, tx, "iam.invitation.revoked", ended, 2)
	})
}

func (m Meta) recordInvitation(ctx context.Context, tx db.Tx, eventType string, i iam.Invitation, version int64) error {
	return change.Record(ctx, tx, m.by(), change.Entry{
		Event:        eventType,
		Action:       iam.UserManage,
		ResourceType: resourceInvitation,
		ResourceID:   i.ID,
		Version:      version,
		OrgID:        i.OrgID,
		After:        map[string]any{"email": i.Email, "roles": i.Roles, "expires_at": i.ExpiresAt},
	})
}

// AcceptInvitationInput is what the invited person chooses.
type AcceptInvitationInput struct {
	Token, DisplayName, Password string
	// TOTP is nil without one-time codes.
	TOTP      *iam.TOTP
	UserAgent string
}

// AcceptInvitation makes the user of an invitation and logs it in.
func (s *Service) AcceptInvitation(ctx context.Context, m Meta, in AcceptInvitationInput) (iam.SessionTokens, error) {
	if err := iam.CheckPassword(in.Password); err != nil {
		return iam.SessionTokens{}, err
	}
	// Before the password is hashed: a token that does not count costs no hash.
	if _, err := db.Query(ctx, s.DB, func(tx db.Tx) (iam.Invitation, error) {
		return iam.OpenInvitation(ctx, tx, in.Token, m.Now)
	}); err != nil {
		return iam.SessionTokens{}, err
	}
	a := iam.Acceptance{Token: in.Token, DisplayName: in.DisplayName, TOTP: in.TOTP}
	if err := s.hash(ctx, func() { a.PasswordHash = iam.HashPassword(in.Password) }); err != nil {
		return iam.SessionTokens{}, err
	}
	userID, fresh := db.NewID(), iam.NewSessionTokens(in.UserAgent, m.SourceAddress, m.Now)
	return run(ctx, s, access.Anyone, func(tx db.Tx, _ access.Nothing) (iam.SessionTokens, error) {
		user, err := iam.AcceptInvitation(ctx, tx, s.Sealer, userID, a, m.Now)
		if err != nil {
			return iam.SessionTokens{}, err
		}
		by := m
		by.Principal = iam.Principal{Type: principal.User, ID: user.ID}
		if err := by.recordUser(ctx, tx, "iam.user.created", actionAccept, user, nil, userState(user)); err != nil {
			return iam.SessionTokens{}, err
		}
		return m.startSession(ctx, tx, fresh, user)
	})
}
