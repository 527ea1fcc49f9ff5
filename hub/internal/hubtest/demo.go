package hubtest

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"path/filepath"
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
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/pkg/manifest/manifesttest"
	"github.com/gpuaas/gpuaas/protocol"
)

// BillADay repeats a report of the node for a day.
func (h *Hub) BillADay(l *Session, generation uint64, status *protocol.WorkloadStatus) {
	h.T.Helper()
	for range 48 {
		l.Report(generation, status)
		require.NoError(h.T, h.Dispatcher.Renew(h.T.Context()))
		h.Advance(30 * time.Minute)
	}
}

// Wallet is in thousandths of the currency.
func (h *Hub) Wallet() int { return Count(h, `SELECT balance_nanos / 1000000 FROM wallets`) }

// NewWithNode returns a hub with the demo app published, an enrolled node, and its session with an empty state.
func NewWithNode(t *testing.T) (*Hub, *Node, *Session) {
	t.Helper()
	return newWithNode(t, manifesttest.Document("demo", DemoImage))
}

// NewWithServices is NewWithNode with a demo of two services.
func NewWithServices(t *testing.T) (*Hub, *Node, *Session) {
	t.Helper()
	return newWithNode(t, manifesttest.Services("demo", DemoImage))
}

// NewWithVolume is NewWithNode with a demo that writes to a volume of its project. The project has an allocation, and a
// volume, which the node has made.
func NewWithVolume(t *testing.T) (h *Hub, n *Node, l *Session, v capacity.Volume) {
	t.Helper()
	const volume = "    volumes: [{name: data, path: /data, size_mib: {min: 16, default: 16, max: 128}, " +
		"scope: project}]\n"
	doc := strings.Replace(manifesttest.Document("demo", DemoImage), "    ports:", volume+"    ports:", 1)
	h, n, l = newWithNode(t, doc)
	h.allocate()
	v, err := (&command.Service{DB: h.DB}).CreateVolume(t.Context(), h.Tenant("volume"), capacity.NewVolume{
		ProjectID: h.Project.ID, Name: "data", SizeBytes: 64 << 20,
	})
	require.NoError(t, err)
	state, _ := l.ExpectVolumes(1)
	l.ReportVolume(state, &protocol.VolumeStatus{Id: v.ID, Status: protocol.VolumeStatus_READY, SizeBytes: 64 << 20})
	return h, n, l, v
}

// NewWithIdentity is NewWithNode with a demo whose instances have service accounts; the key pair is the node's, and
// hello says that it has it.
func NewWithIdentity(t *testing.T) (h *Hub, n *Node, l *Session, pair protocol.SealingKeyPair, hello *protocol.Hello) {
	t.Helper()
	return newSealing(t, strings.Replace(manifesttest.Document("demo", DemoImage), "  metering:",
		"  instance_identity: service_account\n  secrets: {on_change: none}\n  metering:", 1))
}

// NewWithSecret is NewWithIdentity with a demo that has a secret parameter, token, and no service account.
func NewWithSecret(t *testing.T) (h *Hub, n *Node, l *Session, pair protocol.SealingKeyPair, hello *protocol.Hello) {
	t.Helper()
	return newSealing(t, strings.Replace(manifesttest.Document("demo", DemoImage), "greeting: {type",
		"token: {type: string, writeOnly: true}, greeting: {type", 1))
}

// newSealing makes a hub with a node whose sealing key the hub knows.
func newSealing(t *testing.T, doc string) (h *Hub, n *Node, l *Session, pair protocol.SealingKeyPair,
	hello *protocol.Hello,
) {
	t.Helper()
	h = New(t)
	h.publish(doc)
	n = h.Enroll()
	pair, err := protocol.DeriveSealingKey(n.ID, n.Key.Seed())
	require.NoError(t, err)
	hello = Hello("i1")
	hello.Facts.SealingKey, err = pair.Sign(protocol.NewEd25519Signer(n.Key))
	require.NoError(t, err)
	l = n.Connect(hello)
	l.ExpectState(0)
	return h, n, l, pair, hello
}

// NewManaged is NewWithNode with a demo that the platform manages. Lend makes the allocation that it runs in, which the
// platform's project has.
func NewManaged(t *testing.T) (h *Hub, n *Node, l *Session, platform iam.Project, lend func()) {
	t.Helper()
	h, n, l = newWithNode(t, strings.Replace(manifesttest.Document("demo", DemoImage), "runtime_backend: launchable_oci",
		"runtime_backend: launchable_oci, "+
			"supported_modes: {operating_modes: [platform_managed], control_plane_scopes: [platform]}", 1))
	platform = Tx(h, func(ctx context.Context, tx db.Tx) (iam.Project, error) {
		org := iam.Org{ID: db.NewID(), Slug: "platform", DisplayName: "Platform", CreatedAt: h.Now()}
		if err := iam.CreateOrg(ctx, tx, org); err != nil {
			return iam.Project{}, err
		}
		return iam.CreateProject(ctx, tx, iam.Project{
			ID: db.NewID(), OrgID: org.ID, Slug: "managed", DisplayName: "Managed", CreatedAt: h.Now(), Platform: true,
		})
	})
	return h, n, l, platform, func() {
		t.Helper()
		_, err := (&command.Service{DB: h.DB}).CreateAllocation(t.Context(), h.Admin("lend"), capacity.NewAllocation{
			ProjectID: platform.ID, Shape: capacity.GPUSlice, CPUCores: 4, MemoryMiB: 4096,
		})
		require.NoError(t, err)
	}
}

func newWithNode(t *testing.T, doc string) (*Hub, *Node, *Session) {
	t.Helper()
	h := New(t)
	h.publish(doc)
	n := h.Enroll()
	l := n.Connect(Hello("i1"))
	l.ExpectState(0)
	return h, n, l
}

// Running launches an instance, reports it ready, and returns it with its member's id and lease.
func Running(t *testing.T, h *Hub, l *Session) (instance.Instance, string, *protocol.Lease) {
	t.Helper()
	l.LastLeases = nil
	i := h.Launch()
	state, _ := l.ExpectState(1)
	lease := l.ExpectLeases().GetLeases()[0]
	member := i.Members[0].ID
	l.Report(state.GetGeneration(), &protocol.WorkloadStatus{
		MemberId: member, InstanceId: i.ID, Revision: 1, Status: protocol.WorkloadStatus_READY,
		StartedAt: timestamppb.New(h.Now()),
		ReadyAt:   timestamppb.New(h.Now()),
		Endpoints: []*protocol.PublishedEndpoint{{Name: "http", Protocol: "http", Host: "127.0.0.1", Port: 20000}},
	})
	return i, member, lease
}

// SessionSeconds is a usage record of n seconds of a member.
func SessionSeconds(member string, lease *protocol.Lease, from time.Time, n int64) *protocol.UsageRecord {
	return &protocol.UsageRecord{
		MemberId: member, Revision: 1, Meter: protocol.MeterSessionSeconds, Quantity: n * 1_000_000, RunId: "r1",
		LeaseNo:   lease.GetLeaseNo(),
		StartedAt: timestamppb.New(from), EndedAt: timestamppb.New(from.Add(time.Duration(n) * time.Second)),
	}
}

// Ready is the status of an instance whose only member is ready.
func Ready(i instance.Instance) *protocol.WorkloadStatus {
	return &protocol.WorkloadStatus{
		MemberId: i.Members[0].ID, InstanceId: i.ID, Revision: uint64(i.Revision),
		Status: protocol.WorkloadStatus_READY, StartedAt: timestamppb.Now(), ReadyAt: timestamppb.Now(),
	}
}

// The demo app that PublishDemo publishes.
const (
	// Bound is how long a test waits for what should come at once; it only ends a test that has failed anyway.
	Bound      = 30 * time.Second
	DemoRepo   = "apps/demo/runtime"
	DemoImage  = DemoRepo + "@sha256:1111111111111111111111111111111111111111111111111111111111111111"
	Passphrase = "correct horse battery"
)

// PublishDemo makes an org with credit and a price, and entitles its project to the demo app, which a delegated
// publisher signed.
func (h *Hub) PublishDemo() {
	h.T.Helper()
	h.publish(manifesttest.Document("demo", DemoImage))
}

func (h *Hub) publish(doc string) {
	h.T.Helper()
	now := h.Now()
	h.Project = Tx(h, func(ctx context.Context, tx db.Tx) (iam.Project, error) {
		org := iam.Org{ID: db.NewID(), Slug: "acme", DisplayName: "acme", CreatedAt: now}
		if err := iam.CreateOrg(ctx, tx, org); err != nil {
			return iam.Project{}, err
		}
		return iam.CreateProject(ctx, tx, iam.Project{
			ID: db.NewID(), OrgID: org.ID, Slug: "main", DisplayName: "Main",
			CreatedAt: now,
		})
	})
	h.User = iam.Principal{
		Type: principal.User, ID: db.NewID(), OrgID: h.Project.OrgID,
		Bindings: []iam.Binding{{Role: iam.OrgAdmin}},
	}

	h.register(doc)

	Tx(h, func(ctx context.Context, tx db.Tx) (int, error) {
		repository, digest, _ := strings.Cut(DemoImage, "@")
		if _, _, err := artifact.Register(ctx, tx, artifact.Artifact{
			ID: db.NewID(), OrgID: h.Project.OrgID, ProjectID: h.Project.ID, AppSlug: "demo", AppVersion: "1.0.0",
			ArtifactName: "runtime",
			ArtifactKind: artifact.KindOCI, Repository: repository, Digest: digest,
			MediaType:  "application/vnd.oci.image.manifest.v1+json",
			TrustState: artifact.Verified, Channel: "prod", CreatedBy: principal.Actor{Type: principal.User, ID: db.NewID()},
		}, now); err != nil {
			return 0, err
		}
		if _, err := artifact.Activate(ctx, tx, "1.0.0", []manifest.Image{{Ref: DemoImage}}, now); err != nil {
			return 0, err
		}
		if _, _, err := catalog.SetStatus(ctx, tx, "demo", "1.0.0", catalog.Move{To: catalog.Active}, now); err != nil {
			return 0, err
		}
		if _, _, err := catalog.PutEntitlement(ctx, tx, catalog.Entitlement{
			ProjectID: h.Project.ID, OrgID: h.Project.OrgID,
			AppSlug: "demo", Enabled: true, UpdatedBy: db.NewID(),
		}, now); err != nil {
			return 0, err
		}
		if _, err := ledger.CreatePrice(ctx, tx, ledger.Price{
			ID: db.NewID(), Meter: protocol.MeterSessionSeconds, Currency: "EUR", Nanos: 3_600_000_000, Per: "hour",
			From: now.Add(-time.Hour),
		}, now.Add(-2*time.Hour)); err != nil {
			return 0, err
		}
		_, err := ledger.GrantCredit(ctx, tx, ledger.Grant{
			OrgID: h.Project.OrgID, Currency: "EUR",
			Nanos: 1000 * 1_000_000_000, Key: "first",
		}, now)
		return 0, err
	})
}

// register adds a manifest to the catalogue that a fresh publisher has signed.
func (h *Hub) register(doc string) {
	h.T.Helper()
	ctx, now := h.T.Context(), h.Now()
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(h.T, err)
	der, err := x509.MarshalPKIXPublicKey(pub)
	require.NoError(h.T, err)
	delegation, err := trust.Delegate(trust.DelegateOptions{
		CatalogKeyFile: filepath.Join(h.TrustInit.OfflineDir, trust.CatalogKeyFile), Passphrase: Passphrase,
		PublisherPEM: pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), Prefixes: []string{"apps/"}, Now: now,
		TTL: 72 * time.Hour,
	})
	require.NoError(h.T, err)
	commands := &command.Service{DB: h.DB, Bundle: h.Keys.Bundle}
	_, err = commands.RegisterPublisher(ctx, h.Admin("publisher"+db.NewID()), delegation)
	require.NoError(h.T, err)
	env, err := manifest.Sign([]byte(doc), protocol.NewEd25519Signer(key))
	require.NoError(h.T, err)
	_, err = commands.RegisterManifest(ctx, h.Admin("manifest"+db.NewID()), env)
	require.NoError(h.T, err)
}

// LaunchWorker publishes an app that an external worker operates, and creates an instance of it on an allocation of its
// own.
func (h *Hub) LaunchWorker() instance.Instance {
	h.T.Helper()
	h.register(manifesttest.External("cluster"))
	Tx(h, func(ctx context.Context, tx db.Tx) (int, error) {
		_, _, err := catalog.SetStatus(ctx, tx, "cluster", "1.0.0", catalog.Move{To: catalog.Active}, h.Now())
		if err != nil {
			return 0, err
		}
		_, _, err = catalog.PutEntitlement(ctx, tx, catalog.Entitlement{
			ProjectID: h.Project.ID, OrgID: h.Project.OrgID, AppSlug: "cluster", Enabled: true, UpdatedBy: db.NewID(),
		}, h.Now())
		return 0, err
	})
	commands := &command.Service{DB: h.DB, LeaseDuration: time.Hour, Bundle: h.Keys.Bundle, Sealer: PlainSealer{}}
	a, err := commands.CreateAllocation(h.T.Context(), h.Tenant("allocation"+db.NewID()), capacity.NewAllocation{
		ProjectID: h.Project.ID, Shape: capacity.GPUSlice, CPUCores: 1, MemoryMiB: 512,
	})
	require.NoError(h.T, err)
	i, err := commands.CreateInstance(h.T.Context(), h.Tenant("instance"+db.NewID()), command.CreateInstanceInput{
		ProjectID: h.Project.ID, AppSlug: "cluster", Version: "1.0.0", DisplayName: "cluster", AllocationIDs: []string{a.ID},
	})
	require.NoError(h.T, err)
	return i
}

// Launch allocates on the only node and creates an instance of the demo app there.
func (h *Hub) Launch() instance.Instance {
	h.T.Helper()
	return h.LaunchWith(nil)
}

// LaunchWith is Launch with parameters.
func (h *Hub) LaunchWith(parameters map[string]any) instance.Instance {
	h.T.Helper()
	return h.create(command.CreateInstanceInput{Parameters: parameters})
}

// LaunchOn is Launch of the demo of NewWithVolume.
func (h *Hub) LaunchOn(v capacity.Volume) instance.Instance {
	h.T.Helper()
	return h.create(command.CreateInstanceInput{Resources: manifest.Choice{
		CPUMillis: 100, MemoryMiB: 16, Volumes: []manifest.VolumeChoice{{Name: "data", VolumeID: v.ID}},
	}})
}

func (h *Hub) create(in command.CreateInstanceInput) instance.Instance {
	h.T.Helper()
	h.allocate()
	in.ProjectID, in.AppSlug, in.Version, in.DisplayName = h.Project.ID, "demo", "1.0.0", "first"
	i, err := (&command.Service{
		DB: h.DB, LeaseDuration: time.Hour, Bundle: h.Keys.Bundle, Sealer: PlainSealer{},
	}).CreateInstance(h.T.Context(), h.Tenant("instance"+db.NewID()), in)
	require.NoError(h.T, err)
	return i
}

// allocate makes the project's allocation, once.
func (h *Hub) allocate() {
	h.T.Helper()
	if Count(h, `SELECT count(*) FROM allocations`) > 0 {
		return
	}
	_, err := (&command.Service{DB: h.DB}).CreateAllocation(h.T.Context(), h.Tenant("allocation"),
		capacity.NewAllocation{ProjectID: h.Project.ID, Shape: capacity.GPUSlice, CPUCores: 4, MemoryMiB: 4096})
	require.NoError(h.T, err)
}

// Decommission requests the end of an instance.
func (h *Hub) Decommission(id string) {
	h.T.Helper()
	_, err := (&command.Service{DB: h.DB}).DecommissionInstance(h.T.Context(),
		h.Tenant("decommission"+id), h.Project.ID, id)
	require.NoError(h.T, err)
}
