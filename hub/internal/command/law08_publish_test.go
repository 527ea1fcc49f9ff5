package command_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"math"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/oidc/oidctest"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/protocol"
)

// law08Publishing are the commands that take what a publisher signed or pushed.
func law08Publishing(t *testing.T) {
	requireAtomic(t, []atomicStep{
		prepared("register publisher", "publishers", func(p *person, s *command.Service) run {
			s.Bundle = func() protocol.Bundle { return p.Bundle }
			m, delegation := p.Admin("k"), p.delegation("acme", "org/acme/")
			return func(ctx context.Context, s *command.Service) error {
				return second(s.RegisterPublisher(ctx, m, delegation))
			}
		}),
		prepared("register manifest", "app_versions", func(p *person, s *command.Service) run {
			s.Bundle = func() protocol.Bundle { return p.Bundle }
			m := p.Admin("k")
			_, env := p.Sign(strings.Replace(commandtest.Manifest(), "version: 1.0.0", "version: 2.0.0", 1))
			return func(ctx context.Context, s *command.Service) error {
				return second(s.RegisterManifest(ctx, m, env))
			}
		}),
		prepared("register artifact", "artifacts", func(p *person, s *command.Service) run {
			s.Bundle = func() protocol.Bundle { return p.Bundle }
			in := artifact.Artifact{
				ProjectID: p.Project.ID, AppSlug: "spare", AppVersion: "1.0.0", ArtifactName: "runtime", Channel: "prod",
			}
			m := p.Meta("k")
			s.Registry, in.Digest = p.pushed(artifact.Repository("acme", in.AppSlug, in.ArtifactName))
			return func(ctx context.Context, s *command.Service) error {
				return second(s.RegisterArtifact(ctx, m, in))
			}
		}),
		prepared("verify artifact", "artifacts", func(p *person, s *command.Service) run {
			s.Bundle = func() protocol.Bundle { return p.Bundle }
			a, m := p.artifact("late"), p.Meta("k")
			s.Registry, a.Digest = p.pushed(a.Repository)
			p.Exec(`UPDATE artifacts SET digest = $2, trust_state = 'rejected' WHERE id = $1`, a.ID, a.Digest)
			return func(ctx context.Context, s *command.Service) error {
				return second(s.VerifyArtifact(ctx, m, p.Project.ID, a.ID))
			}
		}),
		prepared("promote artifact", "artifacts", func(p *person, _ *command.Service) run {
			a, m := p.artifact("tested"), p.Meta("k")
			return func(ctx context.Context, s *command.Service) error {
				return second(s.PromoteArtifact(ctx, m, p.Project.ID, a.ID, "prod", "tested"))
			}
		}),
		prepared("deprecate artifact", "artifacts", func(p *person, _ *command.Service) run {
			a, m := p.artifact("old"), p.Meta("k")
			return func(ctx context.Context, s *command.Service) error {
				return second(s.DeprecateArtifact(ctx, m, p.Project.ID, a.ID, "superseded"))
			}
		}),
		prepared("retire artifact", "artifacts", func(p *person, _ *command.Service) run {
			a, m := p.artifact("unused"), p.Meta("k")
			return func(ctx context.Context, s *command.Service) error {
				return second(s.RetireArtifact(ctx, m, p.Project.ID, a.ID, "no longer built"))
			}
		}),
		prepared("revoke artifact", "artifacts", func(p *person, _ *command.Service) run {
			a, m := p.artifact("bad"), p.Meta("k")
			return func(ctx context.Context, s *command.Service) error {
				return second(s.RevokeArtifact(ctx, m, p.Project.ID, a.ID, "has a backdoor"))
			}
		}),
	})
}

// artifact registers a verified artifact that no version names.
func (p *person) artifact(name string) (out artifact.Artifact) {
	p.T.Helper()
	p.Tx(func(ctx context.Context, tx db.Tx) (err error) {
		_, out, err = artifact.Register(ctx, tx, artifact.Artifact{
			ID: db.NewID(), OrgID: p.Project.OrgID, ProjectID: p.Project.ID, AppSlug: "demo", AppVersion: "9.0.0",
			ArtifactName: name, Repository: artifact.Repository("acme", "demo", name), Digest: "sha256:1",
			TrustState: artifact.Verified, CreatedBy: principal.Actor{Type: principal.User, ID: db.NewID()},
		}, p.Now)
		return err
	})
	return out
}

// delegation lets a fresh publisher of an org sign, as the catalogue's key says.
func (p *person) delegation(orgSlug string, prefixes ...string) *protocol.Envelope {
	p.T.Helper()
	public, _, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(p.T, err)
	env, err := protocol.SignMessage(protocol.PayloadDelegation, &protocol.Delegation{
		Publisher: &protocol.PublicKey{KeyId: protocol.KeyID(public), Ed25519: public}, OrgSlug: orgSlug,
		RepositoryPrefixes: prefixes, IssuedAt: timestamppb.New(p.Now),
		ExpiresAt: timestamppb.New(p.Now.Add(time.Hour)),
	}, protocol.NewEd25519Signer(p.CatalogKey))
	require.NoError(p.T, err)
	return env
}

// pushed is a registry with an image that was pushed to a repository with the credentials of an intent.
func (p *person) pushed(repository string) (*artifact.Registry, string) {
	p.T.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(p.T, err)
	server := httptest.NewUnstartedServer(nil)
	registry, err := artifact.OpenRegistry(p.T.Context(), artifact.RegistryConfig{
		Dir: p.T.TempDir(), Host: server.Listener.Addr().String(), SigningKey: key, TrustDomain: "gpuaas.test",
		Now:        func() time.Time { return p.Now },
		IntentOpen: func(context.Context, string) error { return nil },
		Quota:      func(context.Context, string) (int64, error) { return math.MaxInt64, nil },
	})
	require.NoError(p.T, err)
	server.Config.Handler = registry
	server.StartTLS()
	p.T.Cleanup(server.Close)
	username, password, err := registry.IntentCredential(artifact.NewIntent(artifact.Intent{
		ID: p.user.ID, AppVersion: "1.0.0", Channel: "prod", Repository: repository,
	}, p.Now))
	require.NoError(p.T, err)
	image, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{OS: "linux", Architecture: "amd64"})
	require.NoError(p.T, err)
	ref, err := name.ParseReference(server.Listener.Addr().String() + "/" + repository + ":1.0.0")
	require.NoError(p.T, err)
	require.NoError(p.T, remote.Write(ref, image, remote.WithTransport(server.Client().Transport),
		remote.WithAuth(&authn.Basic{Username: username, Password: password})))
	digest, err := image.Digest()
	require.NoError(p.T, err)
	return registry, digest.String()
}

// law08ExternalLogins are the logins that an identity provider confirms. A begun one has neither event nor audit row.
func law08ExternalLogins(t *testing.T) {
	identity := func(p *oidctest.Provider, s *command.Service) {
		p.RepeatTokens() // each attempt asks the provider again
		s.Identity = &command.IdentityProvider{
			Provider: p.Client(), OrgsOfDomains: map[string]string{"acme.example": "acme"},
		}
	}
	requireAtomicIn(t, []atomicStep{
		prepared("start browser login", "external_logins", func(p *person, s *command.Service) run {
			identity(oidctest.NewForBrowsers(t), s)
			return func(ctx context.Context, s *command.Service) error {
				return second(s.StartBrowserLogin(ctx, p.anonymous()))
			}
		}),
		prepared("start device login", "external_logins", func(p *person, s *command.Service) run {
			identity(oidctest.NewForDevices(t), s)
			return func(ctx context.Context, s *command.Service) error {
				return second(s.StartDeviceLogin(ctx, p.anonymous()))
			}
		}),
	})
	// The first login of a person makes the user.
	requireAtomicIn(t, []atomicStep{
		prepared("finish browser login", "sessions", func(p *person, s *command.Service) run {
			provider := oidctest.NewForBrowsers(t)
			identity(provider, s)
			begun, err := s.StartBrowserLogin(t.Context(), p.anonymous())
			require.NoError(t, err)
			code := provider.Login(t, begun.URL, "bob").Get("code")
			return func(ctx context.Context, s *command.Service) error {
				return second(s.FinishBrowserLogin(ctx, p.anonymous(), begun.State, code, "test"))
			}
		}),
		prepared("finish device login", "sessions", func(p *person, s *command.Service) run {
			provider := oidctest.NewForDevices(t)
			identity(provider, s)
			begun, err := s.StartDeviceLogin(t.Context(), p.anonymous())
			require.NoError(t, err)
			require.NoError(t, provider.Storage.CompleteDeviceAuthorization(t.Context(), begun.UserCode, "bob"))
			return func(ctx context.Context, s *command.Service) error {
				_, pending, err := s.FinishDeviceLogin(ctx, p.anonymous(), begun.Handle, "test")
				require.False(t, pending)
				return err
			}
		}),
	}, "audit_rows", "events", "users", "user_identities", "external_logins")
}
