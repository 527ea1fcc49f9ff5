package command_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/webhook"
)

// secretAnswers are the commands whose answers hold a secret that a repeated request gets again.
func secretAnswers(p *person) map[string]func(ctx context.Context, s *command.Service, key string) (string, error) {
	admin := p.Admin("").Principal
	asAdmin := func(key string) command.Meta {
		m := p.Admin(key)
		m.Principal = admin
		return m
	}
	return map[string]func(ctx context.Context, s *command.Service, key string) (string, error){
		"a webhook's": func(ctx context.Context, s *command.Service, key string) (string, error) {
			made, err := s.CreateWebhook(ctx, p.Meta(key), webhook.Webhook{
				OrgID: p.Project.OrgID, URL: "https://hooks.example/",
			})
			return made.Secret, err
		},
		"a webhook's other": func(ctx context.Context, s *command.Service, key string) (string, error) {
			made, err := s.CreateWebhook(ctx, p.Meta("hook"), webhook.Webhook{
				OrgID: p.Project.OrgID, URL: "https://hooks.example/",
			})
			require.NoError(p.T, err)
			made, err = s.RotateWebhookSecret(ctx, p.Meta(key), p.Project.OrgID, made.Webhook.ID, time.Hour)
			return made.Secret, err
		},
		"a join token": func(ctx context.Context, s *command.Service, key string) (string, error) {
			made, err := s.CreateJoinToken(ctx, asAdmin(key), fleet.NewToken{})
			return made.Secret, err
		},
		"an account's key": func(ctx context.Context, s *command.Service, key string) (string, error) {
			made, err := s.CreateServiceAccount(ctx, p.Meta(key), iam.ServiceAccount{
				ProjectID: p.Project.ID, Name: "CI", Slug: "ci",
			}, "")
			return made.Key.PrivateKeyPEM, err
		},
		"an account's other key": func(ctx context.Context, s *command.Service, key string) (string, error) {
			made, err := s.CreateServiceAccount(ctx, p.Meta("account"), iam.ServiceAccount{
				ProjectID: p.Project.ID, Name: "CI", Slug: "other-ci",
			}, "")
			require.NoError(p.T, err)
			made, err = s.RotateServiceAccountKey(ctx, p.Meta(key), p.Project.ID, made.Account.ID, time.Hour)
			return made.Key.PrivateKeyPEM, err
		},
		"a personal token": func(ctx context.Context, s *command.Service, key string) (string, error) {
			made, err := s.CreateUserToken(ctx, asAdmin(key), command.CreateUserTokenInput{UserID: p.user.ID})
			return made.Text, err
		},
		"an invitation's token": func(ctx context.Context, s *command.Service, key string) (string, error) {
			made, err := s.CreateInvitation(ctx, p.Meta(key), command.CreateInvitationInput{
				OrgID: p.Project.OrgID, Email: "bob@acme.example",
			})
			return made.Token, err
		},
		"a publisher's password": func(ctx context.Context, s *command.Service, key string) (string, error) {
			s.Registry = p.publishing().Registry
			made, err := s.CreatePublishIntent(ctx, p.Meta(key), artifact.Intent{
				ProjectID: p.Project.ID, AppSlug: "vllm", AppVersion: "1.0.0", ArtifactName: "runtime", Channel: "prod",
			})
			return made.Password, err
		},
		"a session's refresh token": func(ctx context.Context, s *command.Service, key string) (string, error) {
			session := iam.NewSessionTokens("", "", p.Now)
			p.Tx(func(ctx context.Context, tx db.Tx) error { return second(iam.StartSession(ctx, tx, session, p.user)) })
			fresh, err := s.RefreshSession(ctx, p.Meta(key), session.Refresh)
			return fresh.Refresh, err
		},
	}
}

// Law 11: for a repeated request the hub keeps an answer; where a secret is in it, the answer is sealed.
func TestLaw11AnAnswerWithASecretIsKeptSealed(t *testing.T) {
	p := newPerson(newWorld(t))
	p.User.ID = p.user.ID
	s := p.Commands()
	s.Sealer = sealer(t)
	for name, answer := range secretAnswers(p) {
		t.Run(name, func(t *testing.T) {
			p.T = t
			key := db.NewID()
			told, err := answer(t.Context(), s, key)
			require.NoError(t, err)
			again, err := answer(t.Context(), s, key)
			require.NoError(t, err)
			require.Equal(t, told, again)
			// Of a key in PEM, the line that is the key.
			if lines := strings.Split(told, "\n"); len(lines) > 1 {
				told = lines[1]
			}
			require.NotEmpty(t, told)
			p.RequireHidden(told)
		})
	}
}
