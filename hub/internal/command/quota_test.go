package command

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

func (w *world) limit(name iam.Quota, limit int64) {
	w.t.Helper()
	_, err := (&Service{DB: w.d}).PutOrgQuota(w.t.Context(), w.admin(db.NewID()), w.project.OrgID, iam.Limits{name: limit})
	require.NoError(w.t, err)
}

func (w *world) used(name iam.Quota) (n int64) {
	w.t.Helper()
	w.tx(func(ctx context.Context, tx db.Tx) error {
		used, err := QuotaUsage(ctx, tx, w.project.OrgID, w.now)
		n = used[name]
		return err
	})
	return n
}

// publishing is a command that makes publish intents, with a registry that nothing is pushed to.
func (w *world) publishing() *Service {
	w.t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(w.t, err)
	registry, err := artifact.OpenRegistry(w.t.Context(), artifact.RegistryConfig{
		Dir: w.t.TempDir(), Host: "hub.test", SigningKey: key, TrustDomain: "gpuaas.test", Now: func() time.Time {
			return w.now
		},
	})
	require.NoError(w.t, err)
	return &Service{
		DB: w.d, Registry: registry, Bundle: func() protocol.Bundle { return protocol.Bundle{} },
		Sealer: plain{},
	}
}

func TestARequestBeyondAQuotaNamesItAndChangesNothing(t *testing.T) {
	const shape = "H200"
	ada := db.NewID()
	prepare := map[iam.Quota]func(w *world){
		iam.QuotaInstances: func(w *world) { w.allocation() },
		iam.QuotaAccelerators: func(w *world) {
			w.tx(func(ctx context.Context, tx db.Tx) error {
				return capacity.ApplyInventory(ctx, tx, w.node, []*protocol.Accelerator{
					{Id: "GPU-0", Vendor: "nvidia", Model: shape, MemoryBytes: 141 << 30, Health: "ok"},
				}, w.now)
			})
		},
		iam.QuotaUserTokens: func(w *world) {
			w.exec(
				`INSERT INTO users (id, org_id, email, name, platform_admin, created_at, updated_at)
					VALUES ($1, $2, 'ada@acme', 'Ada', false, $3, $3)`,
				ada, w.project.OrgID, w.now)
		},
	}
	attempts := map[iam.Quota]func(w *world) error{
		iam.QuotaAccelerators: func(w *world) error {
			in := w.allocationInput()
			in.AcceleratorCount, in.AcceleratorModel = 1, shape
			return second((&Service{DB: w.d}).CreateAllocation(w.t.Context(), w.meta(db.NewID()), in))
		},
		iam.QuotaPublishIntents: func(w *world) error {
			return second(w.publishing().CreatePublishIntent(w.t.Context(), w.meta(db.NewID()), PublishIntentInput{
				ProjectID: w.project.ID, AppSlug: "vllm", AppVersion: "1.0.0", ArtifactName: "runtime", Channel: "prod",
			}))
		},
		iam.QuotaAppSlugs: func(w *world) error {
			return second(w.publishing().CreatePublishIntent(w.t.Context(), w.meta(db.NewID()), PublishIntentInput{
				ProjectID: w.project.ID, AppSlug: "vllm", AppVersion: "1.0.0", ArtifactName: "runtime", Channel: "prod",
			}))
		},
		iam.QuotaUserTokens: func(w *world) error {
			return second((&Service{DB: w.d, Sealer: plain{}}).CreateUserToken(w.t.Context(), w.admin(db.NewID()),
				CreateUserTokenInput{UserID: ada}))
		},
		iam.QuotaAllocations: func(w *world) error {
			return second((&Service{DB: w.d}).CreateAllocation(w.t.Context(), w.meta(db.NewID()), w.allocationInput()))
		},
		iam.QuotaCPUCores: func(w *world) error {
			return second((&Service{DB: w.d}).CreateAllocation(w.t.Context(), w.meta(db.NewID()), w.allocationInput()))
		},
		iam.QuotaInstances: func(w *world) error {
			return second(w.commands().CreateInstance(w.t.Context(), w.meta(db.NewID()), w.instanceInput()))
		},
		iam.QuotaServiceAccounts: func(w *world) error {
			return second((&Service{DB: w.d, Sealer: plain{}}).CreateServiceAccount(w.t.Context(), w.meta(db.NewID()),
				CreateServiceAccountInput{ProjectID: w.project.ID, Name: "CI", Slug: "ci"}))
		},
		iam.QuotaUsers: func(w *world) error {
			return second((&Service{DB: w.d}).CreateUser(w.t.Context(), w.admin(db.NewID()),
				CreateUserInput{OrgID: w.project.OrgID, Email: "ada@acme.example", DisplayName: "Ada"}))
		},
	}
	for _, name := range iam.QuotaNames() {
		attempt := attempts[name]
		if name == iam.QuotaRegistryBytes {
			continue // its attempt is a push: TestAPushBeyondTheQuotaIsRefusedAndNothingOfItIsKept
		}
		t.Run(string(name), func(t *testing.T) {
			require.NotNil(t, attempt, "each quota has an attempt")
			w := newWorld(t)
			if set := prepare[name]; set != nil {
				set(w)
			}
			used := w.used(name)
			w.limit(name, used)
			before := w.contents()
			err := attempt(w)
			require.True(t, fault.Is(err, fault.Conflict), "%v", err)
			f := fault.As(err)
			require.Equal(t, fault.CodeQuotaExceeded, f.Code)
			require.Equal(t, "quota/"+string(name), f.Fields[0].Pointer)
			require.Equal(t, before, w.contents())

			w.limit(name, used+100)
			require.NoError(t, attempt(w))
			require.Greater(t, w.used(name), used)
		})
	}
}

func TestEveryQuotaIsCounted(t *testing.T) {
	w := newWorld(t)
	w.tx(func(ctx context.Context, tx db.Tx) error {
		used, err := QuotaUsage(ctx, tx, w.project.OrgID, w.now)
		for _, name := range iam.QuotaNames() {
			if name != iam.QuotaRegistryBytes {
				require.Contains(t, used, name)
			}
			require.Positive(t, iam.DefaultLimits()[name])
		}
		return err
	})
}

// TestReservedSlugsAreLimitedGivenBackAndTransferred: a name that is only reserved does not stay with its org for ever.
func TestReservedSlugsAreLimitedGivenBackAndTransferred(t *testing.T) {
	w := newWorld(t)
	m := w.meta("k")
	reserve := func(slug string) error {
		_, err := db.RunTx(t.Context(), w.d, func(tx db.Tx) (struct{}, error) {
			_, reserved, err := publisherOrg(t.Context(), tx, m, w.project, slug)
			if err != nil {
				return struct{}{}, err
			}
			return struct{}{}, checkIntentQuota(t.Context(), tx, m, w.project.OrgID, reserved)
		})
		return err
	}
	w.limit(iam.QuotaAppSlugs, w.used(iam.QuotaAppSlugs)+1)
	require.NoError(t, reserve("vllm"))
	require.NoError(t, reserve("vllm"), "the same again")
	require.Equal(t, fault.CodeQuotaExceeded, fault.As(reserve("ollama")).Code)

	other, stranger := w.tenant("other")
	asStranger := m
	asStranger.Principal = stranger
	release := &Service{DB: w.d}
	for _, orgID := range []string{w.project.OrgID, other.OrgID} {
		require.True(t, fault.Is(release.ReleaseAppSlug(t.Context(), asStranger, orgID, "vllm"), fault.NotFound))
	}
	intent := artifact.NewIntent(artifact.Intent{
		ID: db.NewID(), OrgID: w.project.OrgID, ProjectID: w.project.ID, AppSlug: "vllm", Repository: "org/acme/vllm/runtime",
		CreatedBy: principal.Actor{Type: principal.User, ID: db.NewID()},
	}, w.now)
	w.tx(func(ctx context.Context, tx db.Tx) error { return artifact.AddIntent(ctx, tx, intent) })
	require.EqualValues(t, "app_slug_in_use", fault.As(release.ReleaseAppSlug(t.Context(), m, w.project.OrgID, "vllm")).
		Code)
	m.Now = intent.ExpiresAt.Add(1)
	require.NoError(t, release.ReleaseAppSlug(t.Context(), m, w.project.OrgID, "vllm"))
	require.True(t, fault.Is(release.ReleaseAppSlug(t.Context(), m, w.project.OrgID, "vllm"), fault.NotFound))

	require.NoError(t, reserve("vllm"))
	admin := w.admin(db.NewID())
	admin.Now = m.Now
	transfer := &Service{DB: w.d}
	require.True(t, fault.Is(second(transfer.TransferAppSlug(t.Context(), m, "vllm", other.OrgID)), fault.Forbidden))
	moved, err := transfer.TransferAppSlug(t.Context(), admin, "vllm", other.OrgID)
	require.NoError(t, err)
	require.Equal(t, other.OrgID, moved.OrgID)
	require.Equal(t, catalog.CodeSlugTaken, fault.As(reserve("vllm")).Code)
	require.EqualValues(t, "app_slug_in_use",
		fault.As(second(transfer.TransferAppSlug(t.Context(), admin, "demo", other.OrgID))).Code,
		"a published one stays")
}

func TestTheRegistryKeepsWhatVersionsAndInstancesNameAndAsksTheOrgsQuota(t *testing.T) {
	w := newWorld(t)
	w.allocation()
	w.instance()
	access := &RegistryAccess{DB: w.d, Now: func() time.Time { return w.now }}
	repository, digest, _ := strings.Cut(demoImage, "@")
	ref := artifact.Ref{Repository: repository, Digest: digest}
	for _, gone := range []string{"artifacts", "app_versions"} {
		roots, err := access.Roots(t.Context())
		require.NoError(t, err)
		require.Contains(t, roots.Images, ref)
		w.tx(func(ctx context.Context, tx db.Tx) error {
			_, err := tx.Exec(ctx, `DELETE FROM `+gone)
			return err
		})
	}
	roots, err := access.Roots(t.Context())
	require.NoError(t, err)
	require.Contains(t, roots.Images, ref, "a restored hub knows the instance only")

	w.limit(iam.QuotaRegistryBytes, 5)
	limit, err := access.Quota(t.Context(), "acme")
	require.NoError(t, err)
	require.EqualValues(t, 5, limit)
}
