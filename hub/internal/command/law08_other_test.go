package command_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/webhook"
	"github.com/gpuaas/gpuaas/protocol"
)

// run is a command that is ready to be broken.
type run = func(ctx context.Context, s *command.Service) error

// prepared makes a step of a command; prepare makes the rows that it needs, by a service of its own.
func prepared(name, table string, prepare func(p *person, s *command.Service) run) atomicStep {
	return atomicStep{name, table, func(w *world) func(commandtest.Around) error {
		p, s := newPerson(w), w.Commands()
		s.Sealer = sealer(w.T)
		do := prepare(p, s)
		return w.command(func(ctx context.Context, again *command.Service) error {
			again.Sealer, again.Registry = s.Sealer, s.Registry
			again.Bundle, again.Identity = s.Bundle, s.Identity
			return do(ctx, again)
		})
	}}
}

func law08OtherCommands(t *testing.T) {
	requireAtomic(t, billingSteps())
	requireAtomic(t, orgSteps())
	requireAtomic(t, accountSteps())
	requireAtomic(t, secretSteps())
	requireAtomic(t, catalogSteps())
	requireAtomic(t, volumeSteps())
}

func billingSteps() []atomicStep {
	return []atomicStep{
		prepared("create price", "prices", func(p *person, _ *command.Service) run {
			m, in := p.Admin("k"), ledger.Price{
				ID: db.NewID(), Meter: protocol.MeterSessionSeconds, Currency: "USD", Nanos: 1, Per: "hour",
				From: p.Now.Add(time.Hour),
			}
			return func(ctx context.Context, s *command.Service) error { return second(s.CreatePrice(ctx, m, in)) }
		}),
		prepared("grant credit", "postings", func(p *person, _ *command.Service) run {
			m, in := p.Admin("k"), ledger.Grant{OrgID: p.Project.OrgID, Currency: "EUR", Nanos: 1, Description: "x"}
			return func(ctx context.Context, s *command.Service) error { return second(s.GrantCredit(ctx, m, in)) }
		}),
		prepared("create SKU", "skus", func(p *person, _ *command.Service) run {
			m := p.Admin("k")
			return func(ctx context.Context, s *command.Service) error { return second(s.CreateSKU(ctx, m, smallSKU())) }
		}),
		prepared("retire SKU", "skus", func(p *person, s *command.Service) run {
			_, err := s.CreateSKU(p.T.Context(), p.Admin("made"), smallSKU())
			require.NoError(p.T, err)
			m := p.Admin("k")
			return func(ctx context.Context, s *command.Service) error {
				return second(s.RetireSKU(ctx, m, smallSKU().Slug))
			}
		}),
	}
}

func smallSKU() capacity.SKU {
	return capacity.SKU{Slug: "small", Shape: capacity.GPUSlice, CPUCores: 1, MemoryMiB: 512}
}

func orgSteps() []atomicStep {
	return []atomicStep{
		prepared("bootstrap", "users", func(p *person, _ *command.Service) run {
			return func(ctx context.Context, s *command.Service) error {
				return second(s.Bootstrap(ctx, iam.NewUserToken(), p.Now))
			}
		}),
		prepared("recover admin", "user_tokens", func(p *person, s *command.Service) run {
			_, err := s.Bootstrap(p.T.Context(), iam.NewUserToken(), p.Now)
			require.NoError(p.T, err)
			return func(ctx context.Context, s *command.Service) error {
				return s.RecoverAdmin(ctx, iam.NewUserToken(), p.Now)
			}
		}),
		prepared("set admin password", "user_passwords", func(p *person, s *command.Service) run {
			_, err := s.Bootstrap(p.T.Context(), iam.NewUserToken(), p.Now)
			require.NoError(p.T, err)
			return func(ctx context.Context, s *command.Service) error {
				return second(s.SetAdminPassword(ctx, "a password of the admin", p.Now))
			}
		}),
		prepared("create org", "orgs", func(p *person, _ *command.Service) run {
			m := p.Admin("k")
			return func(ctx context.Context, s *command.Service) error {
				return second(s.CreateOrg(ctx, m, iam.Org{Slug: "fresh", DisplayName: "Fresh"}))
			}
		}),
		prepared("create project", "projects", func(p *person, _ *command.Service) run {
			m := p.Meta("k")
			return func(ctx context.Context, s *command.Service) error {
				return second(s.CreateProject(ctx, m, iam.Project{Slug: "fresh", DisplayName: "Fresh"}))
			}
		}),
		prepared("create user", "users", func(p *person, _ *command.Service) run {
			m := p.Admin("k")
			return func(ctx context.Context, s *command.Service) error {
				return second(s.CreateUser(ctx, m, iam.User{
					OrgID: p.Project.OrgID, Email: "eve@acme.example", DisplayName: "Eve",
				}))
			}
		}),
		prepared("create user token", "user_tokens", func(p *person, _ *command.Service) run {
			m := p.Admin("k")
			return func(ctx context.Context, s *command.Service) error {
				return second(s.CreateUserToken(ctx, m, command.CreateUserTokenInput{UserID: p.user.ID}))
			}
		}),
		prepared("replay webhook", "webhook_dead_letters", func(p *person, s *command.Service) run {
			made, err := s.CreateWebhook(p.T.Context(), p.Meta("made"), webhook.Webhook{
				OrgID: p.Project.OrgID, URL: "https://hooks.example/",
			})
			require.NoError(p.T, err)
			p.Tx(func(ctx context.Context, tx db.Tx) error {
				return webhook.Bury(ctx, tx, made.Webhook.ID, webhook.DeadLetter{
					EventID: db.NewID(), Type: "iam.org.created", Subject: "x", Pos: 1, Tries: 1, FailedAt: p.Now,
				})
			})
			m := p.Meta("k")
			return func(ctx context.Context, s *command.Service) error {
				return second(s.ReplayWebhook(ctx, m, p.Project.OrgID, made.Webhook.ID, ""))
			}
		}),
	}
}

// account makes a service account.
func (p *person) account(s *command.Service) command.ServiceAccountWithKey {
	p.T.Helper()
	made, err := s.CreateServiceAccount(p.T.Context(), p.Meta("account"), iam.ServiceAccount{
		ProjectID: p.Project.ID, Name: "CI", Slug: "ci",
	}, "")
	require.NoError(p.T, err)
	return made
}

func accountSteps() []atomicStep {
	return []atomicStep{
		prepared("create account", "service_accounts", func(p *person, _ *command.Service) run {
			m := p.Meta("k")
			return func(ctx context.Context, s *command.Service) error {
				return second(s.CreateServiceAccount(ctx, m, iam.ServiceAccount{
					ProjectID: p.Project.ID, Name: "CI", Slug: "ci",
				}, ""))
			}
		}),
		prepared("disable account", "service_accounts", func(p *person, s *command.Service) run {
			id, m := p.account(s).Account.ID, p.Meta("k")
			return func(ctx context.Context, s *command.Service) error {
				return second(s.DisableServiceAccount(ctx, m, p.Project.ID, id))
			}
		}),
		prepared("rotate key", "service_account_keys", func(p *person, s *command.Service) run {
			id, m := p.account(s).Account.ID, p.Meta("k")
			return func(ctx context.Context, s *command.Service) error {
				return second(s.RotateServiceAccountKey(ctx, m, p.Project.ID, id, time.Hour))
			}
		}),
		prepared("delete account", "service_accounts", func(p *person, s *command.Service) run {
			id, m := p.account(s).Account.ID, p.Meta("k")
			return func(ctx context.Context, s *command.Service) error {
				return s.DeleteServiceAccount(ctx, m, p.Project.ID, id)
			}
		}),
	}
}

func secretSteps() []atomicStep {
	credential := func(p *person, s *command.Service) command.WrappedCredential {
		made, err := s.CreateAccessCredential(p.T.Context(), p.Meta("made"), p.Project.ID, "bootstrap")
		require.NoError(p.T, err)
		return made
	}
	return []atomicStep{
		prepared("revoke secret", "runtime_secrets", func(p *person, s *command.Service) run {
			v, err := s.CreateSecret(p.T.Context(), p.Meta("made"), p.Project.ID, "hf", "x")
			require.NoError(p.T, err)
			m := p.Meta("k")
			return func(ctx context.Context, s *command.Service) error {
				return second(s.RevokeSecret(ctx, m, p.Project.ID, v.ID))
			}
		}),
		prepared("put package index", "package_indexes", func(p *person, _ *command.Service) run {
			m := p.Meta("k")
			return func(ctx context.Context, s *command.Service) error {
				return second(s.PutPackageIndex(ctx, m, p.Project.ID, "https://packages.example/simple", "", "", ""))
			}
		}),
		prepared("forget environment", "environments", func(p *person, _ *command.Service) run {
			digest := strings.Repeat("a", 64)
			p.Tx(func(ctx context.Context, tx db.Tx) error {
				return capacity.ApplyEnvironments(ctx, tx, map[string][]*protocol.InstalledEnvironment{
					p.Node: {{ProjectId: p.Project.ID, Digest: digest}},
				})
			})
			m := p.Meta("k")
			return func(ctx context.Context, s *command.Service) error {
				return s.ForgetEnvironment(ctx, m, p.Project.ID, p.Node, digest)
			}
		}),
		prepared("rotate credential", "access_credentials", func(p *person, s *command.Service) run {
			made, m := credential(p, s), p.Meta("k")
			return func(ctx context.Context, s *command.Service) error {
				return second(s.RotateAccessCredential(ctx, m, p.Project.ID, made.Credential.ID))
			}
		}),
		prepared("revoke credential", "access_credentials", func(p *person, s *command.Service) run {
			made, m := credential(p, s), p.Meta("k")
			return func(ctx context.Context, s *command.Service) error {
				return second(s.RevokeAccessCredential(ctx, m, p.Project.ID, made.Credential.ID))
			}
		}),
	}
}

func catalogSteps() []atomicStep {
	status := func(do func(ctx context.Context, s *command.Service, m command.Meta) error) func(p *person,
		s *command.Service) run {
		return func(p *person, _ *command.Service) run {
			m := p.Admin("k")
			return func(ctx context.Context, s *command.Service) error { return do(ctx, s, m) }
		}
	}
	demo := command.VersionMove{AppSlug: "demo", Version: "1.0.0", Reason: "r"}
	deprecate := status(func(ctx context.Context, s *command.Service, m command.Meta) error {
		return second(s.DeprecateAppVersion(ctx, m, demo))
	})
	publish := status(func(ctx context.Context, s *command.Service, m command.Meta) error {
		return second(s.PublishAppVersion(ctx, m, demo))
	})
	promote := status(func(ctx context.Context, s *command.Service, m command.Meta) error {
		return second(s.PromoteAppVersion(ctx, m, demo, catalog.Canary, 5))
	})
	retire := status(func(ctx context.Context, s *command.Service, m command.Meta) error {
		return second(s.RetireAppVersion(ctx, m, demo))
	})
	return []atomicStep{
		prepared("deprecate version", "app_versions", deprecate),
		prepared("publish version", "app_versions", func(p *person, s *command.Service) run {
			require.NoError(p.T, deprecate(p, s)(p.T.Context(), s))
			p.Exec(`UPDATE app_versions SET status = 'draft'`)
			return publish(p, s)
		}),
		prepared("promote version", "app_versions", func(p *person, s *command.Service) run {
			p.Exec(`UPDATE app_versions SET status = 'staged'`)
			return promote(p, s)
		}),
		prepared("retire version", "app_versions", func(p *person, s *command.Service) run {
			p.Exec(`UPDATE app_versions SET status = 'deprecated'`)
			return retire(p, s)
		}),
		prepared("put entitlement", "entitlements", func(p *person, _ *command.Service) run {
			m := p.Admin("k")
			return func(ctx context.Context, s *command.Service) error {
				return second(s.PutEntitlement(ctx, m, catalog.Entitlement{ProjectID: p.Project.ID, AppSlug: "demo"}))
			}
		}),
		prepared("create publish intent", "publish_intents", func(p *person, s *command.Service) run {
			s.Registry = p.publishing().Registry
			m := p.Meta("k")
			return func(ctx context.Context, s *command.Service) error {
				return second(s.CreatePublishIntent(ctx, m, artifact.Intent{
					ProjectID: p.Project.ID, AppSlug: "vllm", AppVersion: "1.0.0", ArtifactName: "runtime", Channel: "prod",
				}))
			}
		}),
	}
}

func volumeSteps() []atomicStep {
	// snapshotted is a volume with a snapshot that its node has made.
	snapshotted := func(p *person, s *command.Service) (v capacity.Volume, snapshotID string) {
		p.Allocation()
		v = p.volume("data")
		snapshot, err := s.CreateVolumeSnapshot(p.T.Context(), p.Meta("snapshot"), p.Project.ID, v.ID, "")
		require.NoError(p.T, err)
		p.reportVolume(&protocol.VolumeStatus{
			Id: v.ID, Status: protocol.VolumeStatus_READY,
			Snapshots: []*protocol.SnapshotStatus{{Id: snapshot.ID, Status: protocol.VolumeStatus_READY}},
		})
		return v, snapshot.ID
	}
	return []atomicStep{
		prepared("resize volume", "volumes", func(p *person, _ *command.Service) run {
			p.Allocation()
			v, m := p.volume("data"), p.Meta("k")
			return func(ctx context.Context, s *command.Service) error {
				return second(s.ResizeVolume(ctx, m, p.Project.ID, v.ID, 2*v.SizeBytes))
			}
		}),
		prepared("restore volume", "volumes", func(p *person, s *command.Service) run {
			v, id := snapshotted(p, s)
			m := p.Meta("k")
			return func(ctx context.Context, s *command.Service) error {
				return second(s.RestoreVolume(ctx, m, p.Project.ID, v.ID, id))
			}
		}),
		prepared("delete snapshot", "volume_snapshots", func(p *person, s *command.Service) run {
			v, id := snapshotted(p, s)
			m := p.Meta("k")
			return func(ctx context.Context, s *command.Service) error {
				return second(s.DeleteVolumeSnapshot(ctx, m, p.Project.ID, v.ID, id))
			}
		}),
	}
}

// law08Logins are the commands with an audit row and no event.
func law08Logins(t *testing.T) {
	const password = "correct horse battery"
	accepted := func(p *person, s *command.Service) iam.SessionTokens {
		made, err := p.invite(s)
		require.NoError(t, err)
		started, err := s.AcceptInvitation(t.Context(), p.anonymous(), command.AcceptInvitationInput{
			Token: made.Token, DisplayName: "Bob", Password: password,
		})
		require.NoError(t, err)
		return started
	}
	requireAtomicIn(t, []atomicStep{
		prepared("login", "sessions", func(p *person, s *command.Service) run {
			p.User.ID = p.user.ID
			accepted(p, s)
			return func(ctx context.Context, s *command.Service) error {
				return second(s.Login(ctx, p.anonymous(), command.LoginInput{Email: "bob@acme.example", Password: password}))
			}
		}),
		prepared("refresh session", "sessions", func(p *person, s *command.Service) run {
			p.User.ID = p.user.ID
			started := accepted(p, s)
			m := p.Meta("k")
			return func(ctx context.Context, s *command.Service) error {
				return second(s.RefreshSession(ctx, m, started.Refresh))
			}
		}),
		prepared("mint token", "audit_rows", func(p *person, s *command.Service) run {
			_, err := s.Bootstrap(t.Context(), iam.NewUserToken(), p.Now)
			require.NoError(t, err)
			made := p.account(s)
			return func(ctx context.Context, s *command.Service) error {
				return second(s.MintToken(ctx, p.anonymous(), iam.Proof{
					ServiceAccountID: made.Account.ID, KeyID: made.Key.ID, PrivateKeyPEM: made.Key.PrivateKeyPEM,
				}))
			}
		}),
		prepared("unwrap", "wrapping_tokens", func(p *person, s *command.Service) run {
			made, err := s.CreateAccessCredential(t.Context(), p.Meta("made"), p.Project.ID, "bootstrap")
			require.NoError(t, err)
			return func(ctx context.Context, s *command.Service) error {
				return second(s.Unwrap(ctx, p.Meta(""), made.Token))
			}
		}),
		prepared("audit failure", "audit_rows", func(p *person, _ *command.Service) run {
			return func(ctx context.Context, s *command.Service) error {
				return s.AuditFailure(ctx, p.Meta("k"), command.Failure{Operation: "x", Code: "not_found"})
			}
		}),
		prepared("audit stream", "audit_rows", func(p *person, _ *command.Service) run {
			p.Allocation()
			i := p.Instance()
			return func(ctx context.Context, s *command.Service) error {
				return s.AuditStream(ctx, p.Meta("k"), "apps.instance.logs", i, nil)
			}
		}),
	}, "audit_rows")
	requireAtomic(t, []atomicStep{prepared("logout", "sessions", func(p *person, _ *command.Service) run {
		p.User.ID = p.user.ID
		m, id := p.login()
		m.Principal.SessionID = id
		return func(ctx context.Context, s *command.Service) error { return s.Logout(ctx, m) }
	})})
}
