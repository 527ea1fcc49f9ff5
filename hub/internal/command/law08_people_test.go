package command

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
)

// TestLaw08PeopleCommandsAreOneTransaction is TestLaw08DataEventAndAuditAreOneTransaction for the commands on users.
func TestLaw08PeopleCommandsAreOneTransaction(t *testing.T) {
	type run = func(ctx context.Context, tx db.Tx, m Meta, user iam.User, tokenID string, w *world) error
	steps := map[string]struct {
		table string
		run   run
	}{
		"disable user": {"users", func(ctx context.Context, tx db.Tx, m Meta, u iam.User, _ string, _ *world) error {
			_, err := (&Service{}).disableUser(ctx, tx, m, u.ID)
			return err
		}},
		"enable user": {"users", func(ctx context.Context, tx db.Tx, m Meta, u iam.User, _ string, _ *world) error {
			_, err := (&Service{}).enableUser(ctx, tx, m, u.ID)
			return err
		}},
		"put user roles": {"role_bindings", func(ctx context.Context, tx db.Tx, m Meta, u iam.User, _ string,
			_ *world,
		) error {
			_, err := (&Service{}).putUserRoles(ctx, tx, m, u.ID, []iam.Role{iam.OrgBilling}, nil)
			return err
		}},
		"remove user": {"users", func(ctx context.Context, tx db.Tx, m Meta, u iam.User, _ string, w *world) error {
			return (&Service{}).removeOrgUser(ctx, tx, m, w.project.OrgID, u.ID)
		}},
		"revoke token": {"user_tokens", func(ctx context.Context, tx db.Tx, m Meta, u iam.User, tokenID string,
			_ *world,
		) error {
			return (&Service{}).revokeUserToken(ctx, tx, m, u.ID, tokenID)
		}},
		"revoke tokens": {"user_tokens", func(ctx context.Context, tx db.Tx, m Meta, u iam.User, _ string, _ *world) error {
			return (&Service{}).revokeUserTokens(ctx, tx, m, u.ID)
		}},
		"put project roles": {"role_bindings", func(ctx context.Context, tx db.Tx, m Meta, u iam.User, _ string,
			w *world,
		) error {
			_, err := (&Service{}).putProjectRoles(ctx, tx, m, w.project.ID, u.ID, []iam.Role{iam.ProjectAdmin})
			return err
		}},
		"put quota": {"org_quotas", func(ctx context.Context, tx db.Tx, m Meta, _ iam.User, _ string, w *world) error {
			m.Principal = iam.Principal{Type: principal.User, ID: m.Principal.ID, PlatformAdmin: true}
			_, err := (&Service{}).putOrgQuota(ctx, tx, m, w.project.OrgID, iam.Limits{iam.QuotaUsers: 3})
			return err
		}},
		"release slug": {"apps", func(ctx context.Context, tx db.Tx, m Meta, _ iam.User, _ string, w *world) error {
			return (&Service{}).releaseAppSlug(ctx, tx, m, w.project.OrgID, "spare")
		}},
		"transfer slug": {"apps", func(ctx context.Context, tx db.Tx, m Meta, _ iam.User, _ string, _ *world) error {
			m.Principal = iam.Principal{Type: principal.User, ID: m.Principal.ID, PlatformAdmin: true}
			_, err := (&Service{}).transferAppSlug(ctx, tx, m, "spare", "")
			return err
		}},
	}
	for name, s := range steps {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			var user iam.User
			tokenID := db.NewID()
			w.tx(func(ctx context.Context, tx db.Tx) (err error) {
				user, err = iam.CreateUser(ctx, tx, iam.User{
					ID: db.NewID(), OrgID: w.project.OrgID, Email: "ada@acme.example", DisplayName: "Ada", CreatedAt: w.now,
				})
				if err != nil {
					return err
				}
				if name == "enable user" {
					if user, err = iam.SetUserDisabled(ctx, tx, user, true, w.now); err != nil {
						return err
					}
				}
				if _, _, err := catalog.Reserve(ctx, tx, "spare", w.project.OrgID, w.now); err != nil {
					return err
				}
				return iam.CreateUserToken(ctx, tx, iam.UserToken{
					ID: tokenID, UserID: user.ID, CreatedAt: w.now, ExpiresAt: w.now.Add(iam.DefaultTokenLifetime),
				}, iam.NewUserToken())
			})
			m := w.meta("k")
			run := func(ctx context.Context, tx db.Tx) error { return s.run(ctx, tx, m, user, tokenID, w) }
			before := w.contents()
			statements := w.brokenAt(0, run, false)
			for n := 1; n <= statements; n++ {
				w.brokenAt(n, run, false)
			}
			require.Equal(t, before, w.contents(), "nothing is left of %d broken attempts", statements)
			w.brokenAt(0, run, true)
			after := w.contents()
			for _, table := range []string{s.table, "events", "audit_rows"} {
				require.NotEqual(t, before[table], after[table], table)
			}
		})
	}
}
