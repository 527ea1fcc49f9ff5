// Package hubtest runs the node side of a hub for tests, on a real database and real QUIC and wired as the program
// wires it, and nodes that speak the protocol and run nothing. It owns no test.
package hubtest

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"log/slog"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/dispatch"
	"github.com/gpuaas/gpuaas/hub/internal/event/eventtest"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/hub/internal/nodes"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// RemoveNode removes a node as an admin.
func (h *Hub) RemoveNode(nodeID string, in command.RemoveNodeInput) error {
	return (&command.Service{DB: h.DB}).RemoveNode(h.T.Context(), h.Admin("remove"+db.NewID()), nodeID, in)
}

// Sha is the SHA-256 digest of data.
func Sha(data []byte) []byte {
	sum := sha256.Sum256(data)
	return sum[:]
}

// Hub is the node side of a hub.
type Hub struct {
	T          *testing.T
	DB         *db.DB
	TrustInit  trust.InitOptions
	Keys       *trust.Keys
	Link       *nodelink.Server
	Dispatcher *dispatch.Dispatcher
	Nodes      *nodes.Service
	Listener   *link.Listener
	Project    iam.Project
	User       iam.Principal

	mu     sync.Mutex
	offset time.Duration
	// shutOut is a node that TLS refuses.
	shutOut string
}

// Now is the hub's clock, which a test can set forward.
func (h *Hub) Now() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return time.Now().Add(h.offset)
}

// Advance sets the hub's clock forward.
func (h *Hub) Advance(d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.offset += d
}

// RefuseTLS refuses the handshakes of a node.
func (h *Hub) RefuseTLS(nodeID string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.shutOut = nodeID
}

func (h *Hub) isShutOut(nodeID string) bool {
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

// New starts a hub on an empty database.
func New(t *testing.T) *Hub {
	t.Helper()
	base := t.TempDir()
	d := dbtest.New(t)
	t.Cleanup(func() { eventtest.Conform(t, d) })
	h := &Hub{T: t, DB: d, TrustInit: trust.InitOptions{
		DataDir: filepath.Join(base, "data"), OfflineDir: filepath.Join(base, "keys"), TrustDomain: "gpuaas.test",
		Passphrase: Passphrase,
		Now:        time.Now(), ScryptWorkFactor: 8,
	}}
	_, err := trust.Init(h.TrustInit)
	require.NoError(t, err)
	return h.Start()
}

// Start serves from the hub's database and keys.
func (h *Hub) Start() *Hub {
	t := h.T
	t.Helper()
	var err error
	h.Keys, err = trust.Open(h.TrustInit.DataDir)
	require.NoError(t, err)

	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	certificate := &trust.Server{Keys: h.Keys, TTL: 24 * time.Hour, Now: time.Now}
	h.Link = nodelink.NewServer(nodelink.Options{
		Bundle:      h.Keys.Bundle,
		Certificate: certificate.Certificate,
		IsDenied:    h.isShutOut,
		Now:         time.Now,
		Log:         log,
	})
	h.Dispatcher = dispatch.New(dispatch.Config{
		DB:            h.DB,
		Keys:          h.Keys,
		Link:          h.Link,
		LeaseDuration: time.Hour,
		SyncEvery:     time.Hour,
		Now:           h.Now,
		Log:           log,
	})
	h.Nodes = nodes.New(nodes.Config{
		DB:         h.DB,
		Dispatcher: h.Dispatcher,
		Keys:       h.Keys,
		Registry:   credentials{},
		ReplicaID:  "r1",
		Started:    time.Now().Add(-time.Hour),
		Now:        h.Now,
		Log:        log,
	})
	for _, reason := range fleet.EndReasons() {
		h.DB.OnCommit(reason, func(nodeID string) { h.Link.Disconnect(nodeID, reason) })
	}
	h.Listener, err = link.Listen("127.0.0.1:0", h.Link.TLS(), nil)
	require.NoError(t, err)

	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = h.Link.Serve(ctx, h.Listener, h.Nodes) })
	for _, l := range h.Dispatcher.Loops()[:2] {
		running.Go(func() { _ = l.Run(ctx) }) // leases are renewed by the tests
	}
	t.Cleanup(func() { cancel(); running.Wait() })
	return h
}

// Tx runs a transaction that must succeed.
func Tx[T any](h *Hub, fn func(ctx context.Context, tx db.Tx) (T, error)) T {
	h.T.Helper()
	out, err := db.RunTx(h.T.Context(), h.DB, func(tx db.Tx) (T, error) { return fn(h.T.Context(), tx) })
	require.NoError(h.T, err)
	return out
}

// Count returns the number that a query selects.
func Count(h *Hub, query string, args ...any) int {
	h.T.Helper()
	return Tx(h, func(ctx context.Context, tx db.Tx) (n int, err error) {
		return n, tx.QueryRow(ctx, query, args...).Scan(&n)
	})
}

// Admin is the request of a platform admin with an idempotency key.
func (h *Hub) Admin(key string) command.Meta {
	sum := sha256.Sum256([]byte(key))
	return command.Meta{
		Principal: iam.Principal{Type: principal.User, ID: db.NewID(), PlatformAdmin: true}, Route: "POST /x",
		IdempotencyKey: key, BodyMAC: sum[:],
		CorrelationID: "corr-" + key, Now: h.Now().Truncate(time.Microsecond),
	}
}

// Tenant is the request of a user of the demo project.
func (h *Hub) Tenant(key string) command.Meta {
	m := h.Admin(key)
	m.Principal = h.User
	return m
}

// NodeRow reads a node.
func (h *Hub) NodeRow(id string) fleet.Node {
	h.T.Helper()
	return Tx(h, func(ctx context.Context, tx db.Tx) (fleet.Node, error) { return fleet.Get(ctx, tx, id) })
}

// Enroll joins a new node.
func (h *Hub) Enroll() *Node {
	h.T.Helper()
	ctx := h.T.Context()
	created, err := (&command.Service{DB: h.DB, Sealer: PlainSealer{}}).CreateJoinToken(ctx, h.Admin("token"+db.NewID()),
		fleet.NewToken{})
	require.NoError(h.T, err)
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(h.T, err)
	m := h.Admin("")
	m.Principal = iam.Principal{}
	enrolled, err := (&command.Service{DB: h.DB, Keys: h.Keys, CertificateTTL: time.Hour}).EnrollNode(ctx, m,
		command.EnrollNodeInput{JoinToken: created.Secret, CSRPEM: CSR(h.T, key), Hostname: "n1"})
	require.NoError(h.T, err)
	n := &Node{Hub: h, ID: enrolled.NodeID, Key: key, Identity: protocol.NewNodeIdentity(enrolled.NodeID, pub)}
	n.UseCertificate(enrolled.Certificate.CertificatePEM)
	n.Bundle, err = protocol.VerifyBundle(enrolled.Bundle, h.Keys.RootFingerprint())
	require.NoError(h.T, err)
	return n
}

// PlainSealer seals nothing.
type PlainSealer struct{}

// Seal implements idempotency.Sealer.
func (PlainSealer) Seal(text, _ []byte) ([]byte, error) { return text, nil }

// Open implements idempotency.Sealer.
func (PlainSealer) Open(sealed, _ []byte) ([]byte, error) { return sealed, nil }
