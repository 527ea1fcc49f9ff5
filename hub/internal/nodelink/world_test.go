package nodelink_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
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
	"github.com/gpuaas/gpuaas/hub/internal/dispatch"
	"github.com/gpuaas/gpuaas/hub/internal/event/eventtest"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/hub/internal/nodes"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

const (
	// bound is how long a test waits for what should come at once; it only ends a test that has failed anyway.
	bound        = 30 * time.Second
	demoRepo     = "apps/demo/runtime"
	demoImage    = demoRepo + "@sha256:1111111111111111111111111111111111111111111111111111111111111111"
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
  metering: {kind: session_seconds}
`
	passphrase = "correct horse battery"
)

// hub is the hub's way down and up on a real database and real QUIC, wired as the program wires it.
type hub struct {
	t          *testing.T
	d          *db.DB
	trustInit  trust.InitOptions
	keys       *trust.Keys
	server     *nodelink.Server
	dispatcher *dispatch.Dispatcher
	nodes      *nodes.Service
	listener   *link.Listener
	project    iam.Project
	user       iam.Principal

	mu     sync.Mutex
	offset time.Duration
	// shutOut is a node that TLS refuses.
	shutOut string
}

// now is the hub's clock, which a test can set forward.
func (h *hub) now() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return time.Now().Add(h.offset)
}

func (h *hub) forward(d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.offset += d
}

func (h *hub) isShutOut(nodeID string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.shutOut == nodeID
}

// credentials stands where the registry does.
type credentials struct{}

func (credentials) NodeCredential(nodeID, repository string, now time.Time) (*protocol.PullCredential, error) {
	return &protocol.PullCredential{
		RegistryHost: "hub.test", Username: nodeID, Password: repository,
		ExpiresAt: timestamppb.New(now.Add(time.Minute)),
	}, nil
}

func newHub(t *testing.T) *hub {
	t.Helper()
	base := t.TempDir()
	d := dbtest.New(t)
	t.Cleanup(func() { eventtest.Conform(t, d) })
	h := &hub{t: t, d: d, trustInit: trust.InitOptions{
		DataDir: filepath.Join(base, "data"), OfflineDir: filepath.Join(base, "keys"), TrustDomain: "gpuaas.test",
		Passphrase: passphrase,
		Now:        time.Now(), ScryptWorkFactor: 8,
	}}
	_, err := trust.Init(h.trustInit)
	require.NoError(t, err)
	return h.start()
}

// start serves from the hub's database and keys.
func (h *hub) start() *hub {
	t := h.t
	t.Helper()
	var err error
	h.keys, err = trust.Open(h.trustInit.DataDir)
	require.NoError(t, err)

	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	certificate := &trust.Server{Keys: h.keys, TTL: 24 * time.Hour, Now: time.Now}
	h.server = nodelink.NewServer(nodelink.Options{
		Bundle:      h.keys.Bundle,
		Certificate: certificate.Certificate,
		ShutOut:     h.isShutOut,
		Now:         time.Now,
		Log:         log,
	})
	h.dispatcher = dispatch.New(dispatch.Config{
		DB:            h.d,
		Keys:          h.keys,
		Link:          h.server,
		LeaseDuration: time.Hour,
		SyncEvery:     time.Hour,
		Now:           h.now,
		Log:           log,
	})
	h.nodes = nodes.New(nodes.Config{
		DB:         h.d,
		Dispatcher: h.dispatcher,
		Keys:       h.keys,
		Registry:   credentials{},
		ReplicaID:  "r1",
		Started:    time.Now().Add(-time.Hour),
		Disconnect: h.server.Disconnect,
		Now:        h.now,
		Log:        log,
	})
	h.listener, err = link.Listen("127.0.0.1:0", h.server.TLS(), nil)
	require.NoError(t, err)

	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = h.server.Serve(ctx, h.listener, h.nodes) })
	for _, l := range h.dispatcher.Loops()[:2] {
		running.Go(func() { _ = l.Run(ctx) }) // leases are renewed by the tests
	}
	t.Cleanup(func() { cancel(); running.Wait() })
	return h
}

func tx[T any](h *hub, fn func(ctx context.Context, tx db.Tx) (T, error)) T {
	h.t.Helper()
	out, err := db.RunTx(h.t.Context(), h.d, func(tx db.Tx) (T, error) { return fn(h.t.Context(), tx) })
	require.NoError(h.t, err)
	return out
}

func count(h *hub, query string, args ...any) int {
	h.t.Helper()
	return tx(h, func(ctx context.Context, tx db.Tx) (n int, err error) {
		return n, tx.QueryRow(ctx, query, args...).Scan(&n)
	})
}

func (h *hub) admin(key string) command.Meta {
	sum := sha256.Sum256([]byte(key))
	return command.Meta{
		Principal: iam.Principal{Type: iam.TypeUser, ID: db.NewID(), PlatformAdmin: true}, Route: "POST /x",
		IdempotencyKey: key, BodyHash: sum[:],
		CorrelationID: "corr-" + key, Now: h.now().Truncate(time.Microsecond),
	}
}

func (h *hub) tenant(key string) command.Meta {
	m := h.admin(key)
	m.Principal = h.user
	return m
}

// publish makes an org with credit and a price, and entitles its project to the demo app, which a delegated publisher
// signed.
func (h *hub) publish() {
	h.t.Helper()
	ctx, now := h.t.Context(), h.now()
	h.project = tx(h, func(ctx context.Context, tx db.Tx) (iam.Project, error) {
		org := iam.Org{ID: db.NewID(), Slug: "acme", DisplayName: "acme", CreatedAt: now}
		if err := iam.CreateOrg(ctx, tx, org); err != nil {
			return iam.Project{}, err
		}
		return iam.CreateProject(ctx, tx, iam.Project{
			ID: db.NewID(), OrgID: org.ID, Slug: "main", DisplayName: "Main",
			CreatedAt: now,
		})
	})
	h.user = iam.Principal{
		Type: iam.TypeUser, ID: db.NewID(), OrgID: h.project.OrgID,
		Bindings: []iam.Binding{{Role: iam.OrgAdmin}},
	}

	pub, key, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(h.t, err)
	der, err := x509.MarshalPKIXPublicKey(pub)
	require.NoError(h.t, err)
	delegation, err := trust.Delegate(trust.DelegateOptions{
		CatalogKeyFile: filepath.Join(h.trustInit.OfflineDir, trust.CatalogKeyFile), Passphrase: passphrase,
		PublisherPEM: pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), Prefixes: []string{"apps/"}, Now: now,
		TTL: 72 * time.Hour,
	})
	require.NoError(h.t, err)
	_, err = (&command.Service{DB: h.d, Bundle: h.keys.Bundle}).RegisterPublisher(ctx, h.admin("publisher"), delegation)
	require.NoError(h.t, err)
	env, err := manifest.Sign([]byte(demoManifest), protocol.NewEd25519Signer(key))
	require.NoError(h.t, err)
	_, err = (&command.Service{DB: h.d, Bundle: h.keys.Bundle}).RegisterManifest(ctx, h.admin("manifest"), env)
	require.NoError(h.t, err)

	tx(h, func(ctx context.Context, tx db.Tx) (int, error) {
		repository, digest, _ := strings.Cut(demoImage, "@")
		if _, _, err := artifact.Register(ctx, tx, artifact.Artifact{
			ID: db.NewID(), OrgID: h.project.OrgID, ProjectID: h.project.ID, AppSlug: "demo", AppVersion: "1.0.0",
			ArtifactName: "runtime",
			ArtifactKind: artifact.KindOCI, Repository: repository, Digest: digest,
			MediaType:  "application/vnd.oci.image.manifest.v1+json",
			TrustState: artifact.Verified, Channel: "prod", CreatedBy: artifact.Actor{Type: "user", ID: db.NewID()},
		}, now); err != nil {
			return 0, err
		}
		if _, err := artifact.Activate(ctx, tx, "1.0.0", []string{demoImage}, now); err != nil {
			return 0, err
		}
		if _, _, err := catalog.SetStatus(ctx, tx, "demo", "1.0.0", catalog.Active, now); err != nil {
			return 0, err
		}
		if _, _, err := catalog.PutEntitlement(ctx, tx, catalog.Entitlement{
			ProjectID: h.project.ID, OrgID: h.project.OrgID,
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
			OrgID: h.project.OrgID, Currency: "EUR",
			Nanos: 1000 * 1_000_000_000, Key: "first",
		}, now)
		return 0, err
	})
}

// launch allocates on the only node and creates an instance of the demo app there.
func (h *hub) launch() instance.Instance {
	h.t.Helper()
	if count(h, `SELECT count(*) FROM allocations`) == 0 {
		_, err := (&command.Service{DB: h.d}).CreateAllocation(h.t.Context(), h.tenant("allocation"),
			command.CreateAllocationInput{
				ProjectID: h.project.ID, Shape: capacity.GPUSlice, CPUCores: 4, MemoryMiB: 4096,
			})
		require.NoError(h.t, err)
	}
	i, err := (&command.Service{
		DB: h.d, LeaseDuration: time.Hour, Bundle: h.keys.Bundle,
		EnqueueNode: h.dispatcher.Enqueue,
	}).CreateInstance(h.t.Context(), h.tenant("instance"+db.NewID()), command.CreateInstanceInput{
		ProjectID: h.project.ID,
		AppSlug:   "demo", Version: "1.0.0", DisplayName: "first",
	})
	require.NoError(h.t, err)
	return i
}

func (h *hub) decommission(id string) {
	h.t.Helper()
	_, err := (&command.Service{DB: h.d, EnqueueNode: h.dispatcher.Enqueue}).DecommissionInstance(h.t.Context(),
		h.tenant("decommission"+id), h.project.ID, id)
	require.NoError(h.t, err)
}

func (h *hub) node(id string) fleet.Node {
	h.t.Helper()
	return tx(h, func(ctx context.Context, tx db.Tx) (fleet.Node, error) { return fleet.Get(ctx, tx, id) })
}

// node is an enrolled node that speaks the protocol and runs nothing.
type node struct {
	h      *hub
	id     string
	key    ed25519.PrivateKey
	cert   tls.Certificate
	me     protocol.NodeIdentity
	bundle protocol.Bundle
}

func (h *hub) enrol() *node {
	h.t.Helper()
	ctx := h.t.Context()
	created, err := (&command.Service{DB: h.d, Sealer: plainSealer{}}).CreateJoinToken(ctx, h.admin("token"+db.NewID()),
		command.CreateJoinTokenInput{})
	require.NoError(h.t, err)
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(h.t, err)
	m := h.admin("")
	m.Principal = iam.Principal{}
	enrolled, err := (&command.Service{DB: h.d, Keys: h.keys, CertificateTTL: time.Hour}).EnrolNode(ctx, m,
		command.EnrolNodeInput{JoinToken: created.Secret, CSRPEM: csr(h.t, key), Hostname: "n1"})
	require.NoError(h.t, err)
	n := &node{h: h, id: enrolled.NodeID, key: key, me: protocol.NewNodeIdentity(enrolled.NodeID, pub)}
	n.takeCertificate(enrolled.Certificate.CertificatePEM)
	n.bundle, err = protocol.VerifyBundle(enrolled.Bundle, h.keys.RootFingerprint())
	require.NoError(h.t, err)
	return n
}

func csr(t *testing.T, key ed25519.PrivateKey) string {
	t.Helper()
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	require.NoError(t, err)
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}))
}

func (n *node) takeCertificate(text string) {
	block, _ := pem.Decode([]byte(text))
	n.cert = tls.Certificate{Certificate: [][]byte{block.Bytes}, PrivateKey: n.key}
}

// plainSealer keeps what is sealed as it is.
type plainSealer struct{}

func (plainSealer) Seal(text, _ []byte) ([]byte, error)   { return text, nil }
func (plainSealer) Open(sealed, _ []byte) ([]byte, error) { return sealed, nil }

func (n *node) dial() (*link.Conn, error) {
	return link.Dial(n.h.t.Context(), n.h.listener.Addr().String(), link.ClientTLS(
		func() (*tls.Certificate, error) { return &n.cert, nil },
		link.Peer{Roots: n.bundle.HubCAs, TrustDomain: "gpuaas.test", Kind: protocol.KindHub, Now: time.Now},
	), nil)
}

// line is a node's open session.
type line struct {
	// leases is the last batch that came down. It may overtake the state that it belongs to.
	leases  *protocol.HubMessage
	t       *testing.T
	node    *node
	conn    *link.Conn
	control *link.Stream
	welcome *protocol.Welcome
	// down is what came down the control stream; closed with it.
	down    chan *protocol.HubMessage
	counter uint64
}

// say opens the control stream with a hello and gives the hub's first answer.
func (n *node) say(hello *protocol.Hello) (*link.Conn, *link.Stream, *protocol.HubMessage) {
	t := n.h.t
	t.Helper()
	conn, err := n.dial()
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(link.CodeOK, "") })
	control, err := conn.Open(t.Context(), &protocol.StreamHeader{Kind: protocol.StreamHeader_KIND_CONTROL})
	require.NoError(t, err)
	require.NoError(t, control.Send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Hello{Hello: hello}}))
	answer := &protocol.HubMessage{}
	require.NoError(t, control.Receive(answer, protocol.MaxControlBytes))
	return conn, control, answer
}

func hello(incarnation string) *protocol.Hello {
	return &protocol.Hello{
		ProtocolVersion: protocol.Version, AgentVersion: "test", Incarnation: incarnation, BundleVersion: 1,
		Facts: &protocol.NodeFacts{Hostname: "n1", CpuCores: 8, MemoryBytes: 16 << 30},
	}
}

func (n *node) connect(h *protocol.Hello) *line {
	t := n.h.t
	t.Helper()
	conn, control, answer := n.say(h)
	require.NotNil(t, answer.GetWelcome(), "%v", answer)
	l := &line{
		t: t, node: n, conn: conn, control: control, welcome: answer.GetWelcome(),
		down: make(chan *protocol.HubMessage, 64),
	}
	go func() {
		defer close(l.down)
		for {
			m := &protocol.HubMessage{}
			if control.Receive(m, protocol.MaxControlBytes) != nil {
				return
			}
			l.down <- m
		}
	}()
	return l
}

// pushedLeases are the newest that came since l.leases was emptied; they may have overtaken the state that they belong
// to.
func (l *line) pushedLeases() *protocol.LeaseBatch {
	l.t.Helper()
	m := l.leases
	if m == nil {
		m = next(l, func(m *protocol.HubMessage) (*protocol.HubMessage, bool) { return m, m.GetPushLeases() != nil })
	}
	v, err := protocol.VerifyLeases(m.GetPushLeases().GetEnvelope(), l.node.bundle, l.node.me)
	require.NoError(l.t, err)
	return v.Message()
}

// next waits for a message that pick likes and drops the others.
func next[T any](l *line, pick func(*protocol.HubMessage) (T, bool)) T {
	l.t.Helper()
	for {
		select {
		case m, open := <-l.down:
			require.True(l.t, open, "the session ended")
			if m.GetPushLeases() != nil {
				l.leases = m
			}
			if v, ok := pick(m); ok {
				return v
			}
		case <-time.After(bound):
			require.FailNow(l.t, "nothing came down the control stream")
		}
	}
}

// state waits for a desired state with the number of parts, checks it as a node would, and accepts it.
func (l *line) state(parts int) (*protocol.DesiredState, *protocol.PushState) {
	l.t.Helper()
	push := next(l, func(m *protocol.HubMessage) (*protocol.PushState, bool) {
		if m.GetPushState() == nil {
			return nil, false
		}
		v, err := protocol.VerifyState(m.GetPushState().GetEnvelope(), l.node.bundle, l.node.me)
		require.NoError(l.t, err)
		return m.GetPushState(), len(v.Message().GetParts()) == parts
	})
	v, err := protocol.VerifyState(push.GetEnvelope(), l.node.bundle, l.node.me)
	require.NoError(l.t, err)
	for _, part := range push.GetParts() {
		_, err := protocol.VerifyPart(v, part)
		require.NoError(l.t, err)
	}
	l.accept("state", v.Message().GetEpoch(), v.Message().GetGeneration())
	return v.Message(), push
}

func (l *line) accept(document string, epoch, generation uint64) {
	l.t.Helper()
	l.send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Ack{Ack: &protocol.Ack{
		Document: document,
		Epoch:    epoch, Generation: generation,
	}}})
}

func (l *line) send(m *protocol.NodeMessage) {
	l.t.Helper()
	require.NoError(l.t, l.control.Send(m))
}

// report sends what the node sees and waits until the hub has committed it.
func (l *line) report(generation uint64, statuses ...*protocol.WorkloadStatus) {
	l.t.Helper()
	l.counter++
	l.send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Report{Report: &protocol.Report{
		Counter: l.counter, At: timestamppb.Now(), Epoch: 1, Generation: generation, Workloads: statuses,
	}}})
	next(l, func(m *protocol.HubMessage) (bool, bool) { return true, m.GetReportAck().GetCounter() == l.counter })
}

// fetch asks one thing.
func (l *line) fetch(request *protocol.FetchRequest) *protocol.FetchResponse {
	l.t.Helper()
	stream, err := l.conn.Open(l.t.Context(), &protocol.StreamHeader{Kind: protocol.StreamHeader_KIND_FETCH})
	require.NoError(l.t, err)
	defer func() { _ = stream.Close() }()
	require.NoError(l.t, stream.Send(request))
	response := &protocol.FetchResponse{}
	require.NoError(l.t, stream.Receive(response, protocol.MaxFetchBytes))
	return response
}

// usage is an open usage stream.
func (l *line) usage() *link.Stream {
	l.t.Helper()
	stream, err := l.conn.Open(l.t.Context(), &protocol.StreamHeader{Kind: protocol.StreamHeader_KIND_USAGE})
	require.NoError(l.t, err)
	return stream
}

func upload(t *testing.T, stream *link.Stream, env *protocol.Envelope) *protocol.UsageAck {
	t.Helper()
	require.NoError(t, stream.Send(&protocol.UsageUpload{Segment: env}))
	ack := &protocol.UsageAck{}
	require.NoError(t, stream.Receive(ack, protocol.MaxControlBytes))
	return ack
}

// segments seals runs of records into a chain, one segment each.
func (n *node) segments(incarnation string, runs ...[]*protocol.UsageRecord) []*protocol.Envelope {
	n.h.t.Helper()
	var sequence uint64
	for _, records := range runs {
		for _, r := range records {
			sequence++
			r.Sequence = sequence
		}
	}
	return n.numbered(incarnation, runs...)
}

// numbered is segments whose records have their numbers.
func (n *node) numbered(incarnation string, runs ...[]*protocol.UsageRecord) []*protocol.Envelope {
	n.h.t.Helper()
	var (
		out      []*protocol.Envelope
		previous []byte
	)
	for i, records := range runs {
		env, err := protocol.SignMessage(protocol.PayloadSegment, &protocol.UsageSegment{
			NodeId: n.id, Incarnation: incarnation, Number: uint64(i + 1), PreviousSha256: previous, SealedAt: timestamppb.Now(),
			Records: records,
		}, protocol.NewEd25519Signer(n.key))
		require.NoError(n.h.t, err)
		sum := sha256.Sum256(env.GetPayload())
		previous = sum[:]
		out = append(out, env)
	}
	return out
}
