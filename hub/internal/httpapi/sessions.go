package httpapi

import (
	"context"
	"errors"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// Login starts a session by e-mail address and password.
func (s *Server) Login(ctx context.Context, r LoginRequestObject) (LoginResponseObject, error) {
	tokens, err := s.Commands.Login(ctx, metaFrom(ctx), command.LoginInput{
		Email: r.Body.Email, Password: r.Body.Password, Code: r.Body.Code, UserAgent: userAgent(ctx),
	})
	if refused, ok := errors.AsType[*command.LoginRefusedError](err); ok {
		callOf(ctx).refused = refused
	}
	return Login200JSONResponse(tokensView(ctx, tokens)), err
}

// RefreshSession exchanges a refresh token.
func (s *Server) RefreshSession(ctx context.Context,
	r RefreshSessionRequestObject,
) (RefreshSessionResponseObject, error) {
	tokens, err := s.Commands.RefreshSession(ctx, metaFrom(ctx), r.Body.RefreshToken)
	return RefreshSession200JSONResponse(tokensView(ctx, tokens)), err
}

// Logout ends the caller's session.
func (s *Server) Logout(ctx context.Context, _ LogoutRequestObject) (LogoutResponseObject, error) {
	return Logout204Response{}, s.Commands.Logout(ctx, metaFrom(ctx))
}

// ChangePassword changes the caller's own password.
func (s *Server) ChangePassword(ctx context.Context,
	r ChangePasswordRequestObject,
) (ChangePasswordResponseObject, error) {
	in := command.ChangePasswordInput{
		Current: r.Body.CurrentPassword, Code: r.Body.Code, New: r.Body.NewPassword, RemoveTOTP: r.Body.RemoveOneTimeCodes,
	}
	if totp := r.Body.Totp; totp != nil {
		in.TOTP = &iam.TOTP{Secret: totp.Secret, Code: totp.Code}
	}
	return ChangePassword204Response{}, s.Commands.ChangePassword(ctx, metaFrom(ctx), in)
}

// ListSessions lists the caller's sessions.
func (s *Server) ListSessions(ctx context.Context, r ListSessionsRequestObject) (ListSessionsResponseObject, error) {
	caller := principalOf(ctx)
	items, next, err := pageByID(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]iam.Session, error) {
		return s.Queries.Sessions(ctx, caller, callOf(ctx).at, p)
	}, func(v iam.Session) string { return v.ID })
	return ListSessions200JSONResponse{Items: views(items, func(v iam.Session) Session {
		return Session{
			ID:            v.ID,
			UserAgent:     v.UserAgent,
			SourceAddress: v.SourceAddress,
			Current:       v.ID == caller.SessionID,
			CreatedAt:     v.CreatedAt,
			RefreshedAt:   v.RefreshedAt,
			ExpiresAt:     v.ExpiresAt,
		}
	}), NextCursor: next}, err
}

// RevokeSession ends a session of the caller.
func (s *Server) RevokeSession(ctx context.Context, r RevokeSessionRequestObject) (RevokeSessionResponseObject, error) {
	return RevokeSession204Response{}, s.Commands.RevokeSession(ctx, metaFrom(ctx), r.SessionID)
}

// ListInvitations lists the open invitations of an org.
func (s *Server) ListInvitations(ctx context.Context,
	r ListInvitationsRequestObject,
) (ListInvitationsResponseObject, error) {
	items, next, err := pageByID(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]iam.Invitation, error) {
		return s.Queries.Invitations(ctx, principalOf(ctx), r.OrgID, callOf(ctx).at, p)
	}, func(v iam.Invitation) string { return v.ID })
	return ListInvitations200JSONResponse{Items: views(items, invitationView), NextCursor: next}, err
}

// CreateInvitation invites an e-mail address; the answer holds the token.
func (s *Server) CreateInvitation(ctx context.Context,
	r CreateInvitationRequestObject,
) (CreateInvitationResponseObject, error) {
	made, err := s.Commands.CreateInvitation(ctx, metaFrom(ctx), command.CreateInvitationInput{
		OrgID:    r.OrgID,
		Email:    r.Body.Email,
		Roles:    append(rolesOf(r.Body.Roles), rolesOf(r.Body.CustomRoles)...),
		Lifetime: time.Duration(r.Body.ExpiresInSeconds) * time.Second,
	})
	out := invitationView(made.Invitation)
	out.Token = made.Token
	return CreateInvitation201JSONResponse(out), err
}

// RevokeInvitation takes an invitation back.
func (s *Server) RevokeInvitation(ctx context.Context,
	r RevokeInvitationRequestObject,
) (RevokeInvitationResponseObject, error) {
	return RevokeInvitation204Response{}, s.Commands.RevokeInvitation(ctx, metaFrom(ctx), r.OrgID, r.InvitationID)
}

// AcceptInvitation makes the invited user.
func (s *Server) AcceptInvitation(ctx context.Context,
	r AcceptInvitationRequestObject,
) (AcceptInvitationResponseObject, error) {
	in := command.AcceptInvitationInput{
		Token: r.Body.Token, DisplayName: r.Body.DisplayName, Password: r.Body.Password, UserAgent: userAgent(ctx),
	}
	if totp := r.Body.Totp; totp != nil {
		in.TOTP = &iam.TOTP{Secret: totp.Secret, Code: totp.Code}
	}
	tokens, err := s.Commands.AcceptInvitation(ctx, metaFrom(ctx), in)
	return AcceptInvitation201JSONResponse(tokensView(ctx, tokens)), err
}

func invitationView(i iam.Invitation) Invitation {
	out := Invitation{
		ID:        i.ID,
		OrgID:     i.OrgID,
		Email:     i.Email,
		InvitedBy: i.InvitedBy,
		CreatedAt: i.CreatedAt,
		ExpiresAt: i.ExpiresAt,
	}
	out.Roles, out.CustomRoles = splitRoles[UserRole](i.Roles)
	return out
}

func tokensView(ctx context.Context, t iam.SessionTokens) SessionTokens {
	return SessionTokens{
		SessionID:        t.Session.ID,
		UserID:           t.User.ID,
		AccessToken:      t.Access,
		TokenType:        SessionTokensTokenTypeBearer,
		ExpiresAt:        t.AccessExpiresAt,
		ExpiresIn:        int64(t.AccessExpiresAt.Sub(callOf(ctx).at) / time.Second),
		RefreshToken:     t.Refresh,
		SessionExpiresAt: t.Session.ExpiresAt,
	}
}

// userAgent is what the caller's program calls itself.
func userAgent(ctx context.Context) string {
	if g, ok := ctx.(*gin.Context); ok {
		return g.GetHeader("User-Agent")
	}
	return ""
}
