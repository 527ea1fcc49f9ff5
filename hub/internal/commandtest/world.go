// Package commandtest is a world for tests of commands, periodic passes and node reports: one node, one tenant and one
// app in a real database.
package commandtest

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/event/eventtest"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/fleet/fleettest"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/nodes"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/pkg/manifest/manifesttest"
	"github.com/gpuaas/gpuaas/protocol"
)

// Image is what the demo runs.
const Image = "apps/demo/runtime@sha256:1111111111111111111111111111111111111111111111111111111111111111"

// Manifest returns the manifest of the demo, in version 1.0.0.
func Manifest() string { return manifesttest.Document("demo", Image) }

// World is one node, one tenant and one app in a real database, wired as the hub wires them.
type World struct {
	T       *testing.T
	DB      *db.DB
	Now     time.Time
	Node    string
	Project iam.Project
	User    iam.Principal
	Counter uint64
	// Enqueued are the nodes that commits have enqueued.
	Enqueued []string
	// Release publishes another version of the demo, with the same image.
	Release func(version string)
	// Bundle is the trust bundle with the catalogue's key, and CatalogKey that key.
	Bundle     protocol.Bundle
	CatalogKey ed25519.PrivateKey
	// Sign signs a manifest as the catalogue's key does.
	Sign func(doc string) (manifest.Verified, *protocol.Envelope)
}

// New makes a world in a database of its own.
func New(t *testing.T) *World { return In(t, dbtest.New(t)) }

// In makes a world in an empty, migrated database.
func In(t *testing.T, d *db.DB) *World {
	t.Cleanup(func() { eventtest.Conform(t, d) })
	w := &World{T: t, DB: d, Now: time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)}
	d.OnCommit(fleet.IntentQueue, func(nodeID string) { w.Enqueued = append(w.Enqueued, nodeID) })
	w.Project, w.User = w.NewTenant("acme")
	w.EnrollNode()
	w.publish()
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		if _, err := ledger.CreatePrice(ctx, tx, ledger.Price{
			ID: db.NewID(), Meter: protocol.MeterSessionSeconds, Currency: "EUR", Nanos: 3_600_000_000, Per: "hour",
			From: w.Now.Add(-time.Hour),
		}, w.Now.Add(-2*time.Hour)); err != nil {
			return err
		}
		_, err := ledger.GrantCredit(ctx, tx, ledger.Grant{
			OrgID: w.Project.OrgID, Currency: "EUR",
			Nanos: 1000 * 1_000_000_000, Key: "first",
		}, w.Now)
		return err
	})
	w.Enqueued = nil
	return w
}

// Tx runs fn in a transaction.
func (w *World) Tx(fn func(context.Context, db.Tx) error) {
	w.T.Helper()
	err := db.WriteTx(w.T.Context(), w.DB, func(tx db.Tx) error { return fn(w.T.Context(), tx) })
	require.NoError(w.T, err)
}

// NewTenant makes an org with a project, and an admin of the org.
func (w *World) NewTenant(slug string) (p iam.Project, u iam.Principal) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) (err error) {
		org := iam.Org{ID: db.NewID(), Slug: slug, DisplayName: slug, CreatedAt: w.Now}
		if err := iam.CreateOrg(ctx, tx, org); err != nil {
			return err
		}
		p, err = iam.CreateProject(ctx, tx, iam.Project{
			ID: db.NewID(), OrgID: org.ID, Slug: "main", DisplayName: "Main",
			CreatedAt: w.Now,
		})
		return err
	})
	return p, iam.Principal{
		Type: principal.User, ID: db.NewID(), OrgID: p.OrgID,
		Bindings: []iam.Binding{{Role: iam.OrgAdmin}},
	}
}

// EnrollNode enrolls and connects another node, which becomes the node of the world.
func (w *World) EnrollNode() {
	w.T.Helper()
	pub, _, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(w.T, err)
	secret, err := fleet.NewJoinSecret()
	require.NoError(w.T, err)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		if _, err := fleet.CreateToken(ctx, tx, fleet.NewToken{ID: db.NewID(), Secret: secret, CreatedBy: "admin"},
			w.Now); err != nil {
			return err
		}
		n, _, err := fleet.Enroll(ctx, tx, fleet.Enrollment{
			NodeID: db.NewID(), Secret: secret, Hostname: "n1", PublicKey: pub,
			CertificateExpiresAt: w.Now.Add(time.Hour),
		}, w.Now)
		if err != nil {
			return err
		}
		w.Node = n.ID
		_, err = fleettest.Connect(ctx, tx, fleet.Connection{NodeID: n.ID, ReplicaID: "r1", Hello: &protocol.Hello{
			Features:    manifest.KnownFeatures(),
			Incarnation: "i1", Facts: &protocol.NodeFacts{
				Hostname: "n1", CpuCores: 4, MemoryBytes: 8 << 30, VolumeBytes: 1 << 30,
			},
		}}, w.Now)
		return err
	})
}

// SetFeatures makes the node's agent one that has these features.
func (w *World) SetFeatures(features ...string) {
	w.T.Helper()
	w.Exec(`UPDATE nodes SET features = $2 WHERE id = $1`, w.Node, features)
}

// NewCatalogKey makes the key that Sign signs with, and the bundle that names it.
func (w *World) NewCatalogKey() {
	w.T.Helper()
	_, root, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(w.T, err)
	_, key, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(w.T, err)
	role := func(name string, k ed25519.PrivateKey) *protocol.Role {
		pub, _ := k.Public().(ed25519.PublicKey)
		return &protocol.Role{Name: name, Threshold: 1, Keys: []*protocol.PublicKey{{
			KeyId:   protocol.KeyID(pub),
			Ed25519: pub,
		}}}
	}
	signed, err := protocol.SignMessage(protocol.PayloadBundle, &protocol.TrustBundle{
		TrustDomain: "gpuaas.test", Version: 1, Epoch: 1, IssuedAt: timestamppb.New(w.Now),
		Roles: []*protocol.Role{role(protocol.RoleRoot, root), role(protocol.RoleCatalog, key)},
	}, protocol.NewEd25519Signer(root))
	require.NoError(w.T, err)
	bundle, err := protocol.VerifyBundle(signed, protocol.FingerprintPrefix+role("", root).GetKeys()[0].GetKeyId())
	require.NoError(w.T, err)
	w.Bundle, w.CatalogKey = bundle, key
	w.Sign = func(doc string) (manifest.Verified, *protocol.Envelope) {
		w.T.Helper()
		env, err := manifest.Sign([]byte(doc), protocol.NewEd25519Signer(key))
		require.NoError(w.T, err)
		verified, err := manifest.Verify(env, nil, bundle, w.Now)
		require.NoError(w.T, err)
		return verified, env
	}
}

// publish registers the demo, signed by a catalog key, with its image, and entitles the project.
func (w *World) publish() {
	w.T.Helper()
	w.NewCatalogKey()
	w.Release = func(version string) {
		w.T.Helper()
		verified, env := w.Sign(strings.Replace(Manifest(), "version: 1.0.0", "version: "+version, 1))
		w.PublishVersion(version, verified, env)
	}
	w.Release("1.0.0")
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, _, err := catalog.PutEntitlement(ctx, tx, catalog.Entitlement{
			ProjectID: w.Project.ID, OrgID: w.Project.OrgID,
			AppSlug: "demo", Enabled: true, UpdatedBy: db.NewID(),
		}, w.Now)
		return err
	})
}

// PublishVersion registers and activates a signed manifest with its image.
func (w *World) PublishVersion(version string, verified manifest.Verified, env *protocol.Envelope) {
	w.T.Helper()
	repository, digest, _ := strings.Cut(Image, "@")
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		if _, err := catalog.Register(ctx, tx, catalog.Registration{
			ID: db.NewID(), Verified: verified, Envelope: env,
			Now: w.Now,
		}); err != nil {
			return err
		}
		if _, _, err := artifact.Register(ctx, tx, artifact.Artifact{
			ID: db.NewID(), OrgID: w.Project.OrgID, ProjectID: w.Project.ID, AppSlug: "demo", AppVersion: version,
			ArtifactName: "runtime",
			ArtifactKind: artifact.KindOCI, Repository: repository, Digest: digest,
			MediaType:  "application/vnd.oci.image.manifest.v1+json",
			TrustState: artifact.Verified, Channel: "prod", CreatedBy: principal.Actor{Type: principal.User, ID: db.NewID()},
		}, w.Now); err != nil {
			return err
		}
		if _, err := artifact.Activate(ctx, tx, version, []manifest.Image{{Ref: Image}}, w.Now); err != nil {
			return err
		}
		_, _, err := catalog.SetStatus(ctx, tx, "demo", version, catalog.Move{To: catalog.Active}, w.Now)
		return err
	})
}

// PublishWorker activates a version of an app of an external worker, and entitles the project.
func (w *World) PublishWorker(doc string) {
	w.T.Helper()
	verified, env := w.Sign(doc)
	slug, version := verified.Manifest().App.Slug, verified.Manifest().Version.Version
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		if _, err := catalog.Register(ctx, tx, catalog.Registration{
			ID: db.NewID(), Verified: verified, Envelope: env, Now: w.Now,
		}); err != nil {
			return err
		}
		if _, _, err := catalog.SetStatus(ctx, tx, slug, version, catalog.Move{To: catalog.Active}, w.Now); err != nil {
			return err
		}
		_, _, err := catalog.PutEntitlement(ctx, tx, catalog.Entitlement{
			ProjectID: w.Project.ID, OrgID: w.Project.OrgID, AppSlug: slug, Enabled: true, UpdatedBy: db.NewID(),
		}, w.Now)
		return err
	})
}

// Meta is a request of the tenant with an idempotency key.
func (w *World) Meta(key string) command.Meta {
	sum := sha256.Sum256([]byte(key))
	return command.Meta{
		Principal: w.User, Route: "POST /x", IdempotencyKey: key, BodyMAC: sum[:], CorrelationID: "corr-" + key,
		Now: w.Now,
	}
}

// Commands are the service under test.
func (w *World) Commands() *command.Service {
	return &command.Service{
		DB:            w.DB,
		APIURL:        "https://hub.test",
		LeaseDuration: time.Hour,
		Bundle:        func() protocol.Bundle { return protocol.Bundle{} },
	}
}

// Running is an instance that its node has reported ready.
func (w *World) Running() instance.Instance {
	w.T.Helper()
	w.Allocation()
	i := w.Instance()
	w.Report(1, w.Says(i, protocol.WorkloadStatus_READY))
	return w.Get(i.ID)
}

// AllocationInput asks for an allocation of a quarter of the node.
func (w *World) AllocationInput() capacity.NewAllocation {
	return capacity.NewAllocation{ProjectID: w.Project.ID, Shape: capacity.GPUSlice, CPUCores: 1, MemoryMiB: 512}
}

// InstanceInput asks for an instance of the demo.
func (w *World) InstanceInput() command.CreateInstanceInput {
	return command.CreateInstanceInput{
		ProjectID: w.Project.ID, AppSlug: "demo", Version: "1.0.0", DisplayName: "first", OperatingMode: "tenant_dedicated",
		Parameters: map[string]any{"greeting": "hello"},
	}
}

// Allocation holds capacity on the node.
func (w *World) Allocation() capacity.Allocation {
	w.T.Helper()
	a, err := (&command.Service{DB: w.DB}).CreateAllocation(w.T.Context(), w.Meta("allocation"+db.NewID()),
		w.AllocationInput())
	require.NoError(w.T, err)
	return a
}

// Instance deploys the demo.
func (w *World) Instance() instance.Instance {
	w.T.Helper()
	i, err := w.Commands().CreateInstance(w.T.Context(), w.Meta("instance"+db.NewID()), w.InstanceInput())
	require.NoError(w.T, err)
	return i
}

// Get reads an instance.
func (w *World) Get(id string) (i instance.Instance) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) (err error) {
		i, err = instance.Get(ctx, tx, w.Project.ID, id)
		return err
	})
	return i
}

// Report applies what the node says at a generation, and returns the nodes that it enqueued.
func (w *World) Report(generation uint64, statuses ...*protocol.WorkloadStatus) []string {
	w.T.Helper()
	w.Counter++
	w.Now = w.Now.Add(time.Second)
	before := len(w.Enqueued)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		return nodes.ApplyReport(ctx, tx, w.NodeReport(generation, statuses...), w.Now)
	})
	return w.Enqueued[before:]
}

// NodeReport is a report of the node.
func (w *World) NodeReport(generation uint64, statuses ...*protocol.WorkloadStatus) nodes.Report {
	return nodes.Report{Report: instance.Report{
		NodeID: w.Node, SessionNo: 1, Counter: w.Counter, Epoch: 1, Generation: generation,
		Statuses: statuses,
	}}
}

// Wallet is the money in the org's wallet, in nanos.
func (w *World) Wallet() (available, held int64) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		balances, err := ledger.Wallet(ctx, tx, w.Project.OrgID)
		if err != nil {
			return err
		}
		available, held = balances[0].AvailableNanos, balances[0].HeldNanos
		return nil
	})
	return available, held
}

// Says is what the node reports of an instance.
func (w *World) Says(i instance.Instance, status protocol.WorkloadStatus_Status) *protocol.WorkloadStatus {
	return &protocol.WorkloadStatus{MemberId: i.Members[0].ID, InstanceId: i.ID, Revision: 1, Status: status}
}

// Removed is the proof that nothing of an instance is left on its node.
func (w *World) Removed(i instance.Instance) *protocol.WorkloadStatus {
	s := w.Says(i, protocol.WorkloadStatus_REMOVED)
	s.Removal = &protocol.RemovalProof{At: timestamppb.New(w.Now), Absent: protocol.RemovalKinds(), Incarnation: "i1"}
	return s
}

// EventTypes are the events of a resource, oldest first.
func (w *World) EventTypes(subject string) (types []string) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		list, err := event.BySubject(ctx, tx, event.SubjectQuery{Subject: subject})
		for n, e := range list {
			require.Equal(w.T, int64(n+1), e.ResourceVersion, "events are numbered without a gap")
			types = append(types, e.Type)
		}
		return err
	})
	return types
}

// Upgraded is a running instance whose upgrade to 2.0.0 was asked for.
func (w *World) Upgraded() instance.Instance {
	w.T.Helper()
	i := w.Running()
	w.Release("2.0.0")
	i, err := w.Commands().UpgradeInstance(w.T.Context(), w.Meta("upgrade"+db.NewID()), command.UpgradeInstanceInput{
		ProjectID: w.Project.ID, InstanceID: i.ID, Version: "2.0.0",
	})
	require.NoError(w.T, err)
	return i
}

// Stopped is an instance that was stopped.
func (w *World) Stopped() instance.Instance {
	w.T.Helper()
	i := w.Running()
	_, err := w.Commands().StopInstance(w.T.Context(), w.Meta("stop"+db.NewID()), w.Project.ID, i.ID)
	require.NoError(w.T, err)
	w.Report(2, w.Says(i, protocol.WorkloadStatus_STOPPED))
	return w.Get(i.ID)
}

// Admin is a request of a platform admin.
func (w *World) Admin(key string) command.Meta {
	m := w.Meta(key)
	m.Principal = iam.Principal{Type: principal.User, ID: db.NewID(), PlatformAdmin: true}
	return m
}

// Exec runs a statement.
func (w *World) Exec(sql string, args ...any) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, err := tx.Exec(ctx, sql, args...)
		return err
	})
}

// Count reads a number.
func (w *World) Count(sql string, args ...any) (n int) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) error { return tx.QueryRow(ctx, sql, args...).Scan(&n) })
	return n
}

// Findings lists the findings.
func (w *World) Findings() (out []finding.Finding) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) (err error) {
		out, err = finding.List(ctx, tx)
		return err
	})
	return out
}

// Subjects opens as many of a kind, in one org, and returns their ids in order.
func (w *World) Subjects(kind string, n int) (ids []string) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		ids = nil
		for range n {
			s := ledger.Subject{
				ID: db.NewID(), Kind: kind, OrgID: w.Project.OrgID, ProjectID: w.Project.ID, NodeID: w.Node,
				SKU: "cpu-2", OpenedAt: w.Now,
			}
			if err := ledger.OpenSubject(ctx, tx, s); err != nil {
				return err
			}
			ids = append(ids, s.ID)
		}
		return nil
	})
	slices.Sort(ids)
	return ids
}

// Occupy uses the key of a posting, so that another transaction that makes that one fails.
func (w *World) Occupy(subject, key string) {
	w.T.Helper()
	w.Exec(
		`INSERT INTO postings (id, key, kind, subject_kind, subject_id, org_id, meter, description, correlation_id,
			created_at)
		VALUES ($1, $2, 'occupied', '', $3, $4, '', '', '', $5)`, db.NewID(), key, subject, w.Project.OrgID, w.Now)
}
