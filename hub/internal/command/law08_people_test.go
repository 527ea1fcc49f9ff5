package command_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/idempotency"
	"github.com/gpuaas/gpuaas/hub/internal/webhook"
)

// person is a user with a token, of an org with a reserved app slug.
type person struct {
	*world
	user    iam.User
	tokenID string
}

func newPerson(w *world) *person {
	p := &person{world: w, tokenID: db.NewID()}
	w.Tx(func(ctx context.Context, tx db.Tx) (err error) {
		p.user, err = iam.CreateUser(ctx, tx, iam.User{
			ID: db.NewID(), OrgID: w.Project.OrgID, Email: "ada@acme.example", DisplayName: "Ada", CreatedAt: w.Now,
			Roles: []iam.Role{iam.OrgAdmin},
		})
		if err != nil {
			return err
		}
		if _, _, err := catalog.Reserve(ctx, tx, "spare", w.Project.OrgID, w.Now); err != nil {
			return err
		}
		return iam.CreateUserToken(ctx, tx, iam.UserToken{
			ID: p.tokenID, UserID: p.user.ID, CreatedAt: w.Now, ExpiresAt: w.Now.Add(iam.DefaultTokenLifetime),
		}, iam.NewUserToken())
	})
	return p
}

// disabled disables the user.
func (p *person) disabled() {
	p.Tx(func(ctx context.Context, tx db.Tx) (err error) {
		p.user, err = iam.SetUserDisabled(ctx, tx, p.user, true, p.Now)
		return err
	})
}

// law08PeopleCommandsAreOneTransaction is law08DataEventAndAuditAreOneTransaction for the commands on users.
func law08PeopleCommandsAreOneTransaction(t *testing.T) {
	type run = func(ctx context.Context, s *command.Service, m command.Meta, p *person) error
	var steps []atomicStep
	add := func(name, table string, do run) {
		steps = append(steps, atomicStep{name, table, func(w *world) func(commandtest.Around) error {
			p, m := newPerson(w), w.Meta("k")
			if name == "enable user" {
				p.disabled()
			}
			return w.command(func(ctx context.Context, s *command.Service) error { return do(ctx, s, m, p) })
		}})
	}
	add("disable user", "users", func(ctx context.Context, s *command.Service, m command.Meta, p *person) error {
		return second(s.DisableUser(ctx, m, p.user.ID))
	})
	add("enable user", "users", func(ctx context.Context, s *command.Service, m command.Meta, p *person) error {
		return second(s.EnableUser(ctx, m, p.user.ID))
	})
	add("put user roles", "role_bindings", func(ctx context.Context, s *command.Service, m command.Meta, p *person) error {
		return second(s.PutUserRoles(ctx, m, p.user.ID, iam.Roles{Named: []iam.Role{iam.OrgBilling}}, nil))
	})
	add("remove user", "users", func(ctx context.Context, s *command.Service, m command.Meta, p *person) error {
		return s.RemoveOrgUser(ctx, m, p.Project.OrgID, p.user.ID)
	})
	add("revoke token", "user_tokens", func(ctx context.Context, s *command.Service, m command.Meta, p *person) error {
		return s.RevokeUserToken(ctx, m, p.user.ID, p.tokenID)
	})
	add("revoke tokens", "user_tokens", func(ctx context.Context, s *command.Service, m command.Meta, p *person) error {
		return s.RevokeUserTokens(ctx, m, p.user.ID)
	})
	add("put project roles", "role_bindings", func(ctx context.Context, s *command.Service, m command.Meta,
		p *person,
	) error {
		return second(s.PutProjectRoles(ctx, m, p.Project.ID, p.user.ID, iam.Roles{Named: []iam.Role{iam.ProjectAdmin}}))
	})
	role := func(ctx context.Context, s *command.Service, m command.Meta, p *person) (iam.CustomRole, error) {
		return s.CreateCustomRole(ctx, m, iam.CustomRole{
			OrgID: p.Project.OrgID, Slug: "reader", DisplayName: "R", Permissions: []iam.Permission{iam.InstanceRead},
		})
	}
	add("create role", "custom_roles", func(ctx context.Context, s *command.Service, m command.Meta, p *person) error {
		return second(role(ctx, s, m, p))
	})
	addMade := func(name string, do func(ctx context.Context, s *command.Service, m command.Meta,
		made iam.CustomRole) error,
	) {
		steps = append(steps, atomicStep{name, "custom_roles", func(w *world) func(commandtest.Around) error {
			p, m := newPerson(w), w.Meta("k")
			made, err := role(w.T.Context(), w.Commands(), w.Meta("role"), p)
			require.NoError(w.T, err)
			return w.command(func(ctx context.Context, s *command.Service) error { return do(ctx, s, m, made) })
		}})
	}
	addMade("put role", func(ctx context.Context, s *command.Service, m command.Meta, made iam.CustomRole) error {
		made.DisplayName = "other"
		return second(s.PutCustomRole(ctx, m, made))
	})
	addMade("delete role", func(ctx context.Context, s *command.Service, m command.Meta, made iam.CustomRole) error {
		return s.DeleteCustomRole(ctx, m, made.OrgID, made.ID)
	})
	add("put quota", "org_quotas", func(ctx context.Context, s *command.Service, _ command.Meta, p *person) error {
		return second(s.PutOrgQuota(ctx, p.Admin("k"), p.Project.OrgID, iam.Limits{iam.QuotaUsers: 3}))
	})
	add("release slug", "apps", func(ctx context.Context, s *command.Service, m command.Meta, p *person) error {
		return s.ReleaseAppSlug(ctx, m, p.Project.OrgID, "spare")
	})
	add("transfer slug", "apps", func(ctx context.Context, s *command.Service, _ command.Meta, p *person) error {
		return second(s.TransferAppSlug(ctx, p.Admin("k"), "spare", ""))
	})
	requireAtomic(t, steps)
}

// law08WebhookCommandsAreOneTransaction is law08DataEventAndAuditAreOneTransaction for webhooks.
func law08WebhookCommandsAreOneTransaction(t *testing.T) {
	var steps []atomicStep
	add := func(name string, do func(ctx context.Context, s *command.Service, m command.Meta, w webhook.Webhook) error) {
		steps = append(steps, atomicStep{name, "webhooks", func(w *world) func(commandtest.Around) error {
			hook := webhook.Webhook{OrgID: w.Project.OrgID, URL: "https://hooks.example/"}
			if name != "create webhook" {
				s := w.Commands()
				s.Sealer = idempotency.Plain{}
				made, err := s.CreateWebhook(t.Context(), w.Meta("made"), hook)
				require.NoError(t, err)
				hook = made.Webhook
			}
			if name == "enable webhook" {
				w.Exec(`UPDATE webhooks SET status = 'disabled'`)
			}
			m := w.Meta("k")
			return w.command(func(ctx context.Context, s *command.Service) error {
				s.Sealer = idempotency.Plain{}
				return do(ctx, s, m, hook)
			})
		}})
	}
	add("create webhook", func(ctx context.Context, s *command.Service, m command.Meta, w webhook.Webhook) error {
		return second(s.CreateWebhook(ctx, m, w))
	})
	add("enable webhook", func(ctx context.Context, s *command.Service, m command.Meta, w webhook.Webhook) error {
		return second(s.EnableWebhook(ctx, m, w.OrgID, w.ID))
	})
	add("rotate secret", func(ctx context.Context, s *command.Service, m command.Meta, w webhook.Webhook) error {
		return second(s.RotateWebhookSecret(ctx, m, w.OrgID, w.ID, time.Hour))
	})
	add("delete webhook", func(ctx context.Context, s *command.Service, m command.Meta, w webhook.Webhook) error {
		return s.DeleteWebhook(ctx, m, w.OrgID, w.ID)
	})
	requireAtomic(t, steps)
}
