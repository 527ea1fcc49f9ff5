package command

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/event/eventtest"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/fleet/fleettest"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	demoImage    = "apps/demo/runtime@sha256:1111111111111111111111111111111111111111111111111111111111111111"
	demoManifest = `
app: {slug: demo, display_name: Demo, runtime_backend: launchable_oci}
version:
  version: 1.0.0
  runtime_profile:
    kind: launchable_oci
    image_variants: [{name: cpu, accelerator: none, image_ref: "` + demoImage + `"}]
    command: [/demo]
    ports: [{name: http, container: 8080}]
    resources: {cpu_millis: {min: 100, default: 500, max: 2000}, memory_mib: {min: 16, default: 128, max: 1024}}
    readiness: {kind: http, port: http, path: /}
    readiness_timeout_seconds: 30
  parameters: {type: object, additionalProperties: false, properties: {greeting: {type: string}}}
  metering: {kind: session_seconds}
`
)

// world is one node, one tenant and one app in a real database, wired as the hub wires them.
type world struct {
	t       *testing.T
	d       *db.DB
	now     time.Time
	node    string
	project iam.Project
	user    iam.Principal
	counter uint64
	poked   []string
	// release publishes another version of the demo, with the same image.
	release func(version string)
	// sign signs a manifest as the catalogue's key does.
	sign func(doc string) (manifest.Verified, *protocol.Envelope)
}

func newWorld(t *testing.T) *world {
	d := dbtest.New(t)
	t.Cleanup(func() { eventtest.Conform(t, d) })
	w := &world{t: t, d: d, now: time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)}
	w.project, w.user = w.tenant("acme")
	w.enrol()
	w.publish()
	w.tx(func(ctx context.Context, tx db.Tx) error {
		if _, err := ledger.CreatePrice(ctx, tx, ledger.Price{
			ID: db.NewID(), Meter: protocol.MeterSessionSeconds, Currency: "EUR", Nanos: 3_600_000_000, Per: "hour",
			From: w.now.Add(-time.Hour),
		}, w.now.Add(-2*time.Hour)); err != nil {
			return err
		}
		_, err := ledger.GrantCredit(ctx, tx, ledger.Grant{
			OrgID: w.project.OrgID, Currency: "EUR",
			Nanos: 1000 * 1_000_000_000, Key: "first",
		}, w.now)
		return err
	})
	return w
}

func (w *world) tx(fn func(context.Context, db.Tx) error) {
	w.t.Helper()
	_, err := db.RunTx(w.t.Context(), w.d, func(tx db.Tx) (struct{}, error) { return struct{}{}, fn(w.t.Context(), tx) })
	require.NoError(w.t, err)
}

func (w *world) tenant(slug string) (p iam.Project, u iam.Principal) {
	w.t.Helper()
	w.tx(func(ctx context.Context, tx db.Tx) (err error) {
		org := iam.Org{ID: db.NewID(), Slug: slug, DisplayName: slug, CreatedAt: w.now}
		if err := iam.CreateOrg(ctx, tx, org); err != nil {
			return err
		}
		p, err = iam.CreateProject(ctx, tx, iam.Project{
			ID: db.NewID(), OrgID: org.ID, Slug: "main", DisplayName: "Main",
			CreatedAt: w.now,
		})
		return err
	})
	return p, iam.Principal{
		Type: principal.User, ID: db.NewID(), OrgID: p.OrgID,
		Bindings: []iam.Binding{{Role: iam.OrgAdmin}},
	}
}

func (w *world) enrol() {
	w.t.Helper()
	pub, _, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(w.t, err)
	secret, err := fleet.NewJoinSecret()
	require.NoError(w.t, err)
	w.tx(func(ctx context.Context, tx db.Tx) error {
		if _, err := fleet.CreateToken(ctx, tx, fleet.NewToken{ID: db.NewID(), Secret: secret, CreatedBy: "admin"},
			w.now); err != nil {
			return err
		}
		n, _, err := fleet.Enroll(ctx, tx, fleet.Enrollment{
			NodeID: db.NewID(), Secret: secret, Hostname: "n1", PublicKey: pub,
			CertificateExpiresAt: w.now.Add(time.Hour),
		}, w.now)
		if err != nil {
			return err
		}
		w.node = n.ID
		_, err = fleettest.Connect(ctx, tx, fleet.Connection{NodeID: n.ID, ReplicaID: "r1", Hello: &protocol.Hello{
			Incarnation: "i1", Facts: &protocol.NodeFacts{Hostname: "n1", CpuCores: 4, MemoryBytes: 8 << 30},
		}}, w.now)
		return err
	})
}

// publish registers the demo, signed by a catalog key, with its image, and entitles the project.
func (w *world) publish() {
	w.t.Helper()
	_, root, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(w.t, err)
	_, key, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(w.t, err)
	role := func(name string, k ed25519.PrivateKey) *protocol.Role {
		pub, _ := k.Public().(ed25519.PublicKey)
		return &protocol.Role{Name: name, Threshold: 1, Keys: []*protocol.PublicKey{{
			KeyId:   protocol.KeyID(pub),
			Ed25519: pub,
		}}}
	}
	signed, err := protocol.SignMessage(protocol.PayloadBundle, &protocol.TrustBundle{
		TrustDomain: "gpuaas.test", Version: 1, Epoch: 1, IssuedAt: timestamppb.New(w.now),
		Roles: []*protocol.Role{role(protocol.RoleRoot, root), role(protocol.RoleCatalog, key)},
	}, protocol.NewEd25519Signer(root))
	require.NoError(w.t, err)
	bundle, err := protocol.VerifyBundle(signed, protocol.FingerprintPrefix+role("", root).GetKeys()[0].GetKeyId())
	require.NoError(w.t, err)
	w.sign = func(doc string) (manifest.Verified, *protocol.Envelope) {
		w.t.Helper()
		env, err := manifest.Sign([]byte(doc), protocol.NewEd25519Signer(key))
		require.NoError(w.t, err)
		verified, err := manifest.Verify(env, nil, bundle, w.now)
		require.NoError(w.t, err)
		return verified, env
	}
	w.release = func(version string) {
		w.t.Helper()
		verified, env := w.sign(strings.Replace(demoManifest, "version: 1.0.0", "version: "+version, 1))
		w.publishVersion(version, verified, env)
	}
	w.release("1.0.0")
	w.tx(func(ctx context.Context, tx db.Tx) error {
		_, _, err := catalog.PutEntitlement(ctx, tx, catalog.Entitlement{
			ProjectID: w.project.ID, OrgID: w.project.OrgID,
			AppSlug: "demo", Enabled: true, UpdatedBy: db.NewID(),
		}, w.now)
		return err
	})
}

func (w *world) publishVersion(version string, verified manifest.Verified, env *protocol.Envelope) {
	w.t.Helper()
	repository, digest, _ := strings.Cut(demoImage, "@")
	w.tx(func(ctx context.Context, tx db.Tx) error {
		if _, err := catalog.Register(ctx, tx, catalog.Registration{
			ID: db.NewID(), Verified: verified, Envelope: env,
			Now: w.now,
		}); err != nil {
			return err
		}
		if _, _, err := artifact.Register(ctx, tx, artifact.Artifact{
			ID: db.NewID(), OrgID: w.project.OrgID, ProjectID: w.project.ID, AppSlug: "demo", AppVersion: version,
			ArtifactName: "runtime",
			ArtifactKind: artifact.KindOCI, Repository: repository, Digest: digest,
			MediaType:  "application/vnd.oci.image.manifest.v1+json",
			TrustState: artifact.Verified, Channel: "prod", CreatedBy: principal.Actor{Type: principal.User, ID: db.NewID()},
		}, w.now); err != nil {
			return err
		}
		if _, err := artifact.Activate(ctx, tx, version, []string{demoImage}, w.now); err != nil {
			return err
		}
		_, _, err := catalog.SetStatus(ctx, tx, "demo", version, catalog.Active, w.now)
		return err
	})
}

func (w *world) meta(key string) Meta {
	sum := sha256.Sum256([]byte(key))
	return Meta{
		Principal: w.user, Route: "POST /x", IdempotencyKey: key, BodyHash: sum[:], CorrelationID: "corr-" + key,
		Now: w.now,
	}
}

// commands are the service under test; poked has the nodes that it enqueued.
func (w *world) commands() *Service {
	return &Service{
		DB:            w.d,
		LeaseDuration: time.Hour,
		Bundle:        func() protocol.Bundle { return protocol.Bundle{} },
		EnqueueNode:   w.poke,
		ShutOut:       func(string, string) {},
		Disconnect:    func(string, string) {},
		Log:           slog.New(slog.DiscardHandler),
	}
}

func (w *world) poke(nodeID string) { w.poked = append(w.poked, nodeID) }

// running is an instance that its node has reported ready.
func (w *world) running() instance.Instance {
	w.t.Helper()
	w.allocation()
	i := w.instance()
	w.report(1, w.says(i, protocol.WorkloadStatus_READY))
	return w.get(i.ID)
}

func (w *world) allocationInput() CreateAllocationInput {
	return CreateAllocationInput{ProjectID: w.project.ID, Shape: capacity.GPUSlice, CPUCores: 1, MemoryMiB: 512}
}

func (w *world) instanceInput() CreateInstanceInput {
	return CreateInstanceInput{
		ProjectID: w.project.ID, AppSlug: "demo", Version: "1.0.0", DisplayName: "first", OperatingMode: "tenant_dedicated",
		Parameters: map[string]any{"greeting": "hello"},
	}
}

func (w *world) allocation() capacity.Allocation {
	w.t.Helper()
	a, err := (&Service{DB: w.d}).CreateAllocation(w.t.Context(), w.meta("allocation"+db.NewID()), w.allocationInput())
	require.NoError(w.t, err)
	return a
}

func (w *world) instance() instance.Instance {
	w.t.Helper()
	i, err := w.commands().CreateInstance(w.t.Context(), w.meta("instance"+db.NewID()), w.instanceInput())
	require.NoError(w.t, err)
	return i
}

func (w *world) get(id string) (i instance.Instance) {
	w.t.Helper()
	w.tx(func(ctx context.Context, tx db.Tx) (err error) {
		i, err = instance.Get(ctx, tx, w.project.ID, id)
		return err
	})
	return i
}

// report is what the node says at a generation; it gives the nodes that were touched by it.
func (w *world) report(generation uint64, statuses ...*protocol.WorkloadStatus) (touched []string) {
	w.t.Helper()
	w.counter++
	w.now = w.now.Add(time.Second)
	w.tx(func(ctx context.Context, tx db.Tx) error {
		out, err := Observe(ctx, tx, w.nodeReport(generation, statuses...), w.now)
		touched = out.TouchedNodes
		return err
	})
	return touched
}

func (w *world) nodeReport(generation uint64, statuses ...*protocol.WorkloadStatus) Report {
	return Report{NodeID: w.node, SessionNo: 1, Counter: w.counter, Epoch: 1, Generation: generation, Statuses: statuses}
}

func (w *world) wallet() (available, held int64) {
	w.t.Helper()
	w.tx(func(ctx context.Context, tx db.Tx) error {
		balances, err := ledger.Wallet(ctx, tx, w.project.OrgID)
		if err != nil {
			return err
		}
		available, held = balances[0].AvailableNanos, balances[0].HeldNanos
		return nil
	})
	return available, held
}

// contents counts the rows of every table: two equal ones mean that nothing was added or removed.
func (w *world) contents() map[string]string {
	w.t.Helper()
	out := map[string]string{}
	w.tx(func(ctx context.Context, tx db.Tx) error {
		rows, err := tx.Query(ctx,
			`SELECT table_name FROM information_schema.tables WHERE table_schema = 'public' AND table_type = 'BASE TABLE'
				ORDER BY table_name`)
		if err != nil {
			return err
		}
		tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			return err
		}
		for _, table := range tables {
			var digest string
			// Every row as text, hashed: a changed row shows too.
			if err := tx.QueryRow(ctx,
				`SELECT count(*)::TEXT || ' ' || coalesce(md5(string_agg(t::TEXT, '|' ORDER BY t::TEXT)), '') FROM `+
					pgx.Identifier{table}.Sanitize()+` t`).Scan(&digest); err != nil {
				return err
			}
			out[table] = digest
		}
		return nil
	})
	return out
}

var errInjected = errors.New("injected")

// breakingTx fails its nth statement; 0 lets all pass. It counts them.
type breakingTx struct {
	db.Tx
	n, seen int
}

func (b *breakingTx) hit() bool {
	b.seen++
	return b.seen == b.n
}

func (b *breakingTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if b.hit() {
		return pgconn.CommandTag{}, errInjected
	}
	return b.Tx.Exec(ctx, sql, args...)
}

func (b *breakingTx) Queue(ctx context.Context, sql string, args ...any) error {
	if b.hit() {
		return errInjected
	}
	return b.Tx.Queue(ctx, sql, args...)
}

func (b *breakingTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if b.hit() {
		return nil, errInjected
	}
	return b.Tx.Query(ctx, sql, args...)
}

func (b *breakingTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if b.hit() {
		return brokenRow{}
	}
	return b.Tx.QueryRow(ctx, sql, args...)
}

func (b *breakingTx) CopyIn(ctx context.Context, sql string, rows io.Reader) (pgconn.CommandTag, error) {
	if b.hit() {
		return pgconn.CommandTag{}, errInjected
	}
	return b.Tx.CopyIn(ctx, sql, rows)
}

type brokenRow struct{}

func (brokenRow) Scan(...any) error { return errInjected }
