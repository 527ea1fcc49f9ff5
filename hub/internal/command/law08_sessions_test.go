package command_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
)

// law08SessionCommandsAreOneTransaction is law08DataEventAndAuditAreOneTransaction for invitations and
// sessions.
func law08SessionCommandsAreOneTransaction(t *testing.T) {
	kek, err := secret.NewKEK([]byte("0123456789abcdef0123456789abcdef"))
	require.NoError(t, err)
	sealer := secret.NewSealer(kek)
	step := func(name, table string, prepare func(s *command.Service, p *person) func(ctx context.Context,
		s *command.Service) error,
	) atomicStep {
		return atomicStep{name, table, func(w *world) func(commandtest.Around) error {
			p, s := newPerson(w), w.Commands()
			p.User.ID, s.Sealer = p.user.ID, sealer
			do := prepare(s, p)
			return w.command(func(ctx context.Context, s *command.Service) error {
				s.Sealer = sealer
				return do(ctx, s)
			})
		}}
	}
	requireAtomic(t, []atomicStep{
		step("create invitation", "invitations", func(_ *command.Service, p *person) func(context.Context,
			*command.Service) error {
			return func(_ context.Context, s *command.Service) error { return second(p.invite(s)) }
		}),
		step("revoke invitation", "invitations", func(s *command.Service, p *person) func(context.Context,
			*command.Service) error {
			made, err := p.invite(s)
			require.NoError(t, err)
			return func(ctx context.Context, s *command.Service) error {
				return s.RevokeInvitation(ctx, p.Meta("k"), p.Project.OrgID, made.Invitation.ID)
			}
		}),
		step("accept invitation", "user_passwords", func(s *command.Service, p *person) func(context.Context,
			*command.Service) error {
			made, err := p.invite(s)
			require.NoError(t, err)
			return func(ctx context.Context, s *command.Service) error {
				return second(s.AcceptInvitation(ctx, p.anonymous(), command.AcceptInvitationInput{
					Token: made.Token, DisplayName: "Bob", Password: "correct horse battery",
				}))
			}
		}),
		step("change password", "user_passwords", func(s *command.Service, p *person) func(context.Context,
			*command.Service) error {
			made, err := p.invite(s)
			require.NoError(t, err)
			started, err := s.AcceptInvitation(t.Context(), p.anonymous(), command.AcceptInvitationInput{
				Token: made.Token, DisplayName: "Bob", Password: "correct horse battery",
			})
			require.NoError(t, err)
			m := p.Meta("k")
			m.Principal = iam.Principal{Type: principal.User, ID: started.User.ID, OrgID: started.User.OrgID}
			return func(ctx context.Context, s *command.Service) error {
				return s.ChangePassword(ctx, m, command.ChangePasswordInput{
					Current: "correct horse battery", New: "another horse battery", RemoveTOTP: true,
				})
			}
		}),
		step("revoke session", "sessions", func(_ *command.Service, p *person) func(context.Context,
			*command.Service) error {
			m, id := p.login()
			return func(ctx context.Context, s *command.Service) error { return s.RevokeSession(ctx, m, id) }
		}),
	})
}

func (p *person) invite(s *command.Service) (command.InvitationWithToken, error) {
	return s.CreateInvitation(p.T.Context(), p.Meta("invite"), command.CreateInvitationInput{
		OrgID: p.Project.OrgID, Email: "bob@acme.example",
	})
}

func (p *person) anonymous() command.Meta {
	m := p.Meta("")
	m.Principal = iam.Principal{}
	return m
}

// login starts a session of the user, who is the caller of the request that is returned.
func (p *person) login() (command.Meta, string) {
	fresh := iam.NewSessionTokens("test", "192.0.2.1", p.Now)
	p.Tx(func(ctx context.Context, tx db.Tx) error { return second(iam.StartSession(ctx, tx, fresh, p.user)) })
	return p.Meta("k"), fresh.Session.ID
}
