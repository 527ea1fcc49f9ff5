package command_test

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
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/idempotency"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/internal/query"
	"github.com/gpuaas/gpuaas/hub/internal/quota"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

func (w *world) limit(name iam.Quota, limit int64) {
	w.T.Helper()
	_, err := (&command.Service{DB: w.DB}).PutOrgQuota(w.T.Context(), w.Admin(db.NewID()), w.Project.OrgID,
		iam.Limits{name: limit})
	require.NoError(w.T, err)
}

func (w *world) used(name iam.Quota) (n int64) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		used, err := quota.Usage(ctx, tx, w.Project.OrgID, w.Now)
		n = used[name]
		return err
	})
	return n
}

// publishing is a command that makes publish intents, with a registry that nothing is pushed to.
func (w *world) publishing() *command.Service {
	w.T.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(w.T, err)
	registry, err := artifact.OpenRegistry(w.T.Context(), artifact.RegistryConfig{
		Dir: w.T.TempDir(), Host: "hub.test", SigningKey: key, TrustDomain: "gpuaas.test", Now: func() time.Time {
			return w.Now
		},
	})
	require.NoError(w.T, err)
	return &command.Service{
		DB: w.DB, Registry: registry, Bundle: func() protocol.Bundle { return protocol.Bundle{} },
		Sealer: idempotency.Plain{},
	}
}

// quotaAttempts are a request for each quota, and what some of them need first.
func quotaAttempts(shape, ada string) (prepare map[iam.Quota]func(w *world),
	attempts map[iam.Quota]func(w *world) error,
) {
	prepare = map[iam.Quota]func(w *world){
		iam.QuotaInstances:   func(w *world) { w.Allocation() },
		iam.QuotaVolumeBytes: func(w *world) { w.Allocation() },
		iam.QuotaAccelerators: func(w *world) {
			w.Tx(func(ctx context.Context, tx db.Tx) error {
				_, err := capacity.ApplyInventory(ctx, tx, w.Node, []*protocol.Accelerator{
					{Id: "GPU-0", Vendor: "nvidia", Model: shape, MemoryBytes: 141 << 30, Health: "ok"},
				}, w.Now)
				return err
			})
		},
		iam.QuotaUserTokens: func(w *world) {
			w.Exec(
				`INSERT INTO users (id, org_id, email, name, platform_admin, created_at, updated_at)
					VALUES ($1, $2, 'ada@acme', 'Ada', false, $3, $3)`,
				ada, w.Project.OrgID, w.Now)
		},
	}
	publish := func(w *world) error {
		return second(w.publishing().CreatePublishIntent(w.T.Context(), w.Meta(db.NewID()), artifact.Intent{
			ProjectID: w.Project.ID, AppSlug: "vllm", AppVersion: "1.0.0", ArtifactName: "runtime", Channel: "prod",
		}))
	}
	allocate := func(w *world) error {
		return second((&command.Service{DB: w.DB}).CreateAllocation(w.T.Context(), w.Meta(db.NewID()), w.AllocationInput()))
	}
	attempts = map[iam.Quota]func(w *world) error{
		iam.QuotaAccelerators: func(w *world) error {
			in := w.AllocationInput()
			in.AcceleratorCount, in.AcceleratorModel = 1, shape
			return second((&command.Service{DB: w.DB}).CreateAllocation(w.T.Context(), w.Meta(db.NewID()), in))
		},
		iam.QuotaPublishIntents: publish,
		iam.QuotaAppSlugs:       publish,
		iam.QuotaUserTokens: func(w *world) error {
			return second((&command.Service{DB: w.DB, Sealer: idempotency.Plain{}}).CreateUserToken(w.T.Context(),
				w.Admin(db.NewID()),
				command.CreateUserTokenInput{UserID: ada}))
		},
		iam.QuotaAllocations: allocate,
		iam.QuotaCPUCores:    allocate,
		iam.QuotaVolumeBytes: func(w *world) error {
			return second(w.Commands().CreateVolume(w.T.Context(), w.Meta(db.NewID()), capacity.NewVolume{
				ProjectID: w.Project.ID, Name: "models", SizeBytes: 64 << 20,
			}))
		},
		iam.QuotaInstances: func(w *world) error {
			return second(w.Commands().CreateInstance(w.T.Context(), w.Meta(db.NewID()), w.InstanceInput()))
		},
		iam.QuotaServiceAccounts: func(w *world) error {
			return second((&command.Service{DB: w.DB, Sealer: idempotency.Plain{}}).CreateServiceAccount(w.T.Context(),
				w.Meta(db.NewID()),
				iam.ServiceAccount{ProjectID: w.Project.ID, Name: "CI", Slug: "ci"}, ""))
		},
		iam.QuotaUsers: func(w *world) error {
			return second((&command.Service{DB: w.DB}).CreateUser(w.T.Context(), w.Admin(db.NewID()),
				iam.User{OrgID: w.Project.OrgID, Email: "ada@acme.example", DisplayName: "Ada"}))
		},
	}
	return prepare, attempts
}

func TestARequestBeyondAQuotaNamesItAndChangesNothing(t *testing.T) {
	const shape = "H200"
	ada := db.NewID()
	prepare, attempts := quotaAttempts(shape, ada)
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
			before := w.Contents()
			err := attempt(w)
			require.True(t, fault.Is(err, fault.Conflict), "%v", err)
			f := fault.As(err)
			require.Equal(t, fault.CodeQuotaExceeded, f.Code)
			require.Equal(t, "quota/"+string(name), f.Fields[0].Pointer)
			require.Equal(t, before, w.Contents())

			w.limit(name, used+1<<30)
			require.NoError(t, attempt(w))
			require.Greater(t, w.used(name), used)
		})
	}
}

func TestEveryQuotaIsCounted(t *testing.T) {
	w := newWorld(t)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		used, err := quota.Usage(ctx, tx, w.Project.OrgID, w.Now)
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
	m := w.Meta("k")
	reserve := func(slug string) error {
		_, err := db.RunTx(t.Context(), w.DB, func(tx db.Tx) (struct{}, error) {
			reserved, err := command.PublisherOrg(t.Context(), tx, m, w.Project, slug)
			if err != nil {
				return struct{}{}, err
			}
			return struct{}{}, quota.CheckIntent(t.Context(), tx, w.Project.OrgID, reserved, m.Now)
		})
		return err
	}
	w.limit(iam.QuotaAppSlugs, w.used(iam.QuotaAppSlugs)+1)
	require.NoError(t, reserve("vllm"))
	require.NoError(t, reserve("vllm"), "the same again")
	require.Equal(t, fault.CodeQuotaExceeded, fault.As(reserve("ollama")).Code)

	other, stranger := w.NewTenant("other")
	asStranger := m
	asStranger.Principal = stranger
	release := &command.Service{DB: w.DB}
	for _, orgID := range []string{w.Project.OrgID, other.OrgID} {
		require.True(t, fault.Is(release.ReleaseAppSlug(t.Context(), asStranger, orgID, "vllm"), fault.NotFound))
	}
	intent := artifact.NewIntent(artifact.Intent{
		ID: db.NewID(), OrgID: w.Project.OrgID, ProjectID: w.Project.ID, AppSlug: "vllm", Repository: "org/acme/vllm/runtime",
		CreatedBy: principal.Actor{Type: principal.User, ID: db.NewID()},
	}, w.Now)
	w.Tx(func(ctx context.Context, tx db.Tx) error { return artifact.AddIntent(ctx, tx, intent) })
	require.EqualValues(t, "app_slug_in_use", fault.As(release.ReleaseAppSlug(t.Context(), m, w.Project.OrgID, "vllm")).
		Code)
	m.Now = intent.ExpiresAt.Add(1)
	require.NoError(t, release.ReleaseAppSlug(t.Context(), m, w.Project.OrgID, "vllm"))
	require.True(t, fault.Is(release.ReleaseAppSlug(t.Context(), m, w.Project.OrgID, "vllm"), fault.NotFound))

	require.NoError(t, reserve("vllm"))
	admin := w.Admin(db.NewID())
	admin.Now = m.Now
	transfer := &command.Service{DB: w.DB}
	require.True(t, fault.Is(second(transfer.TransferAppSlug(t.Context(), m, "vllm", other.OrgID)), fault.Forbidden))
	broken := (&command.Service{DB: w.DB}).WithAround(func(tx db.Tx, body func(db.Tx) error) error {
		return body(&commandtest.BreakingTx{Tx: tx, N: 1})
	})
	err := second(broken.TransferAppSlug(t.Context(), admin, "vllm", other.OrgID))
	require.EqualValues(t, "internal", fault.As(err).Code, "a database that fails is not an org that does not exist")
	require.EqualValues(t, "org_unknown",
		fault.As(second(transfer.TransferAppSlug(t.Context(), admin, "vllm", db.NewID()))).Code)
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
	w.Allocation()
	w.Instance()
	registry := &query.RegistryAccess{DB: w.DB, Now: func() time.Time { return w.Now }}
	repository, digest, _ := strings.Cut(commandtest.Image, "@")
	ref := artifact.Ref{Repository: repository, Digest: digest}
	for _, gone := range []string{"artifacts", "app_versions"} {
		roots, err := registry.Roots(t.Context())
		require.NoError(t, err)
		require.Contains(t, roots.Images, ref)
		w.Tx(func(ctx context.Context, tx db.Tx) error {
			_, err := tx.Exec(ctx, `DELETE FROM `+gone)
			return err
		})
	}
	roots, err := registry.Roots(t.Context())
	require.NoError(t, err)
	require.Contains(t, roots.Images, ref, "a restored hub knows the instance only")

	w.limit(iam.QuotaRegistryBytes, 5)
	limit, err := registry.Quota(t.Context(), "acme")
	require.NoError(t, err)
	require.EqualValues(t, 5, limit)
}
