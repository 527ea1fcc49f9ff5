// Package nodelink owns the live connections of nodes: the control stream with its bounded outbox, and the streams for
// usage, fetches and tunnels. It only transports: package nodes handles what a node sends, and package dispatch decides
// what is pushed to it. A slow stream or node delays no other.
package nodelink

import (
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"

	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

const (
	// helloTimeout bounds how long a connection may stay without a hello, answerTimeout how long that may wait for its
	// answer.
	helloTimeout  = 3 * time.Second
	answerTimeout = 15 * time.Second
	// writeTimeout bounds one message down the control stream: a node that does not read is dropped and dials again.
	writeTimeout = 60 * time.Second
	// fetchTimeout bounds one fetch, from its request to the last byte of its answer.
	fetchTimeout = 60 * time.Second
	// tunnelAnswerTimeout bounds how long a node may take to answer a tunnel request.
	tunnelAnswerTimeout = 15 * time.Second
	// maxUsageStreams, maxFetches and maxTunnels bound one connection, maxOrgTunnels the share of one org; streams beyond
	// are aborted, tunnels beyond refused.
	maxUsageStreams = 2
	maxFetches      = 16
	maxTunnels      = 16
	maxOrgTunnels   = 4
	// maxParallelPushes spreads a fan-out: uncapped, a push to thousands takes longer for all of them. A writer that waits
	// for its place longer than pushWait goes on without one, so that nodes that do not read cannot hold up the others.
	maxParallelPushes = 64
	pushWait          = time.Second
	// messageRate and messageBurst bound what one node may say on its control stream. One that says more is heard later,
	// and delays itself.
	messageRate  = 10 // a second
	messageBurst = 100
	// messagesPerState is how many messages do not count after a new state was sent: that it and its leases were accepted,
	// and reports of what came of it. However fast tenants act, their node is heard at once.
	messagesPerState = 4
	// maxUsageAhead is how many segments of one stream may wait for the same commit: a node that catches up sends several.
	maxUsageAhead = 16
	// segmentEnvelopeBytes is what the envelope of a usage segment may add to its payload.
	segmentEnvelopeBytes = 16 << 10
)

// Opened is what intake answers to a hello.
type Opened struct {
	SessionNo uint64
	// Complete says that the node holds all that is wanted of it: nothing is to be sent.
	Complete bool
	// Members is how many members the node has now. It bounds the reports of the session; a node that gets many more dials
	// again.
	Members int
	Welcome *protocol.Welcome
}

// Peer is the node at the other end, from its certificate.
type Peer struct {
	NodeID string
	Key    ed25519.PublicKey
}

// Intake takes what nodes say.
type Intake interface {
	Hello(ctx context.Context, peer Peer, hello *protocol.Hello) (Opened, error)
	Report(ctx context.Context, peer Peer, sessionNo uint64, report *protocol.Report) error
	Ack(ctx context.Context, nodeID string, ack *protocol.Ack) error
	Nack(ctx context.Context, nodeID string, nack *protocol.Nack) error
	// Usage takes a segment of the store that the session was opened with, in the order of the calls, and returns what
	// waits for its acknowledgement.
	Usage(ctx context.Context, peer Peer, incarnation string, upload *protocol.UsageUpload) func() *protocol.UsageAck
	StateUpload(ctx context.Context, peer Peer, upload *protocol.StateUpload) error
	Gone(ctx context.Context, nodeID string, sessionNo uint64) error
	// Stopped takes the end of all sessions of this hub process.
	Stopped(ctx context.Context) error
}

// Documents gives what nodes fetch. Its errors carry a refusal reason.
type Documents interface {
	// Part returns the part of one of the node's newest states.
	Part(ctx context.Context, nodeID string, sha256 []byte) ([]byte, error)
	// MayPull reports whether the node's newest state needs an image of the repository.
	MayPull(ctx context.Context, nodeID, repository string) (bool, error)
}

// Credentials gives short-lived credentials for the registry that work only on connections that show the node's
// certificate.
type Credentials interface {
	NodeCredential(nodeID, repository string, now time.Time) (*protocol.PullCredential, error)
}

// Options are what a Server needs.
type Options struct {
	Intake      Intake
	Documents   Documents
	Credentials Credentials
	// Bundle returns the newest trust bundle.
	Bundle func() protocol.Bundle
	// BundleAfter returns the newest one that may succeed the one with the version.
	BundleAfter func(version uint64) protocol.Bundle
	// Certificate returns the hub's own.
	Certificate link.Certificate
	// Connected is called when a node's connection counts; dispatch looks what the node lacks.
	Connected func(nodeID string)
	// ShutOut reports whether a node is known to be banned or removed: TLS refuses it. The database decides at the hello.
	// It may be nil.
	ShutOut func(nodeID string) bool
	Now     func() time.Time
	Log     *slog.Logger
}

// Server holds the connections of this hub process.
type Server struct {
	Options

	pushes chan struct{}

	mu    sync.Mutex
	nodes map[string]*connection
	// opening are the connections whose hello is being answered, by node.
	opening map[string][]*arrival
	ended   sync.WaitGroup

	opened, refused metric.Int64Counter
}

// NewServer makes a server without connections.
func NewServer(o Options) *Server {
	s := &Server{
		Options: o, pushes: make(chan struct{}, maxParallelPushes), nodes: map[string]*connection{},
		opening: map[string][]*arrival{},
	}
	// An instrument that cannot be made counts nothing; its error would be a misspelt name.
	meter := otel.Meter("gpuaas/nodelink")
	s.opened, _ = meter.Int64Counter("gpuaas.sessions.opened", metric.WithDescription("Sessions that nodes opened."))
	s.refused, _ = meter.Int64Counter("gpuaas.sessions.refused",
		metric.WithDescription("Connections that were not let in."))
	_, _ = meter.Int64ObservableGauge("gpuaas.sessions", metric.WithDescription("Nodes connected to this hub."),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
			o.Observe(int64(len(s.Nodes())))
			return nil
		}))
	return s
}

// TLS is for link.Listen: nodes show a certificate of the node authority of the moment.
func (s *Server) TLS() *tls.Config {
	return link.ServerTLS(s.Certificate, link.Peer{
		Roots:       func() *x509.CertPool { return s.Bundle().NodeCAs() },
		TrustDomain: s.Bundle().TrustDomain(), Kind: protocol.KindNode, Now: s.Now, Allow: s.allow,
	})
}

// errShutOut ends the handshake of a node that is banned or removed.
var errShutOut = errors.New("the node is banned or was removed")

func (s *Server) allow(nodeID string) error {
	if s.ShutOut != nil && s.ShutOut(nodeID) {
		return errShutOut
	}
	return nil
}

// Serve takes connections until ctx ends, then sends GoAway to all and waits for them.
func (s *Server) Serve(ctx context.Context, listener *link.Listener) error {
	var failed error
	for {
		conn, err := listener.Accept(ctx)
		if err != nil {
			if ctx.Err() == nil && !errors.Is(err, link.ErrClosed) {
				failed = err
			}
			break
		}
		s.ended.Go(func() { s.serve(ctx, conn) })
	}
	// First: those who dial again at once are to meet the next hub and not this one.
	_ = listener.Stop()
	for _, c := range s.connections() {
		c.end(link.CodeShutdown, shuttingDown)
	}
	s.ended.Wait()
	s.stopped(context.WithoutCancel(ctx))
	// Last: the socket carries the farewells.
	_ = listener.Close()
	return failed
}

// stopped records the end of all sessions at once: one by one they would keep a hub that stops for as long as they are
// many.
func (s *Server) stopped(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	if err := s.Intake.Stopped(ctx); err != nil {
		s.Log.WarnContext(ctx, "end of sessions not recorded", slog.Any("error", err))
	}
}

func (s *Server) connections() []*connection {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.nodes))
}

// Nodes returns the ids of the connected nodes, sorted.
func (s *Server) Nodes() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.nodes))
}

func (s *Server) of(nodeID string) *connection {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.nodes[nodeID]
}

// Kick ends a node's connection and tells it why.
func (s *Server) Kick(nodeID, reason string) {
	if c := s.of(nodeID); c != nil {
		c.end(link.CodeBanned, reason)
	}
}

// Held is what a connected node is known to hold.
type Held struct {
	SessionNo     uint64
	Incarnation   string
	Epoch         uint64
	Generation    uint64
	StateSHA256   []byte
	BundleVersion uint64
	// LeasesSHA256 is of the leases that were pushed last on this connection.
	LeasesSHA256 []byte
}

// Holding is what a node holds.
type Holding struct {
	NodeID string
	Held
}

// HeldBy is what a node says in its hello that it holds.
func HeldBy(h *protocol.Hello) Held {
	return Held{
		Incarnation: h.GetIncarnation(), Epoch: h.GetEpoch(), Generation: h.GetGeneration(), StateSHA256: h.GetStateSha256(),
		BundleVersion: h.GetBundleVersion(),
	}
}

// Held returns what the node holds; ok is false when it is not connected here. One that is just being let in is looked
// at again once it is: something may be wanted of it that came after what its hello was held against.
func (s *Server) Held(nodeID string) (held Held, ok bool) {
	s.mu.Lock()
	c := s.nodes[nodeID]
	for _, a := range s.opening[nodeID] {
		a.missed = true
	}
	s.mu.Unlock()
	if c == nil {
		return Held{}, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.held, true
}

// PushState sends a state, unless the node is gone.
func (s *Server) PushState(nodeID string, m *protocol.PushState, generation uint64, sha256 []byte) {
	if c := s.of(nodeID); c != nil {
		c.mu.Lock()
		c.pushedGeneration, c.pushedSHA256 = generation, sha256
		c.mu.Unlock()
		c.out.put(func(o *outbox) { o.state = m })
	}
}

// PushLeases sends a batch of leases, unless the node is gone. sha256 is of its content without its time.
func (s *Server) PushLeases(nodeID string, m *protocol.PushLeases, sha256 []byte) {
	if c := s.of(nodeID); c != nil {
		c.mu.Lock()
		c.held.LeasesSHA256 = sha256
		c.mu.Unlock()
		c.out.put(func(o *outbox) { o.leases = m })
	}
}

// PushBundle sends a trust bundle, unless the node is gone.
func (s *Server) PushBundle(nodeID string, m *protocol.PushBundle) {
	if c := s.of(nodeID); c != nil {
		c.out.put(func(o *outbox) { o.bundle = m })
	}
}

// peerOf reads the identity that TLS verified.
func (s *Server) peerOf(conn *link.Conn) (Peer, error) {
	chain := conn.PeerCertificates()
	if len(chain) == 0 {
		return Peer{}, errors.New("no certificate")
	}
	id, err := protocol.PeerID(chain[0], s.Bundle().TrustDomain(), protocol.KindNode)
	if err != nil {
		return Peer{}, err
	}
	key, ok := chain[0].PublicKey.(ed25519.PublicKey)
	if !ok {
		return Peer{}, fmt.Errorf("the certificate of node %s holds no Ed25519 key", id)
	}
	return Peer{NodeID: id, Key: key}, nil
}

// serve runs one connection from its first stream to its end.
func (s *Server) serve(ctx context.Context, conn *link.Conn) {
	defer func() { _ = conn.Close(link.CodeOK, "") }()

	peer, err := s.peerOf(conn)
	if err != nil {
		s.Log.WarnContext(ctx, "node without identity", slog.Any("error", err),
			slog.String("address", conn.RemoteAddr().String()))
		_ = conn.Close(link.CodeProtocol, "no usable certificate")
		return
	}
	log := s.Log.With(slog.String("node_id", peer.NodeID))
	c, err := s.open(ctx, conn, peer, log)
	if err != nil {
		s.refused.Add(ctx, 1)
		log.InfoContext(ctx, "session not opened", slog.Any("error", err), slog.String("address", conn.RemoteAddr().String()))
		return
	}
	if !s.register(c) {
		_ = conn.Close(link.CodeSuperseded, "a newer connection of this node is open")
		return
	}
	failpoint.Hit("hub/session/registered")
	s.opened.Add(ctx, 1)
	log.InfoContext(ctx, "node connected", slog.Uint64("session_no", c.held.SessionNo),
		slog.String("address", conn.RemoteAddr().String()))
	if ctx.Err() != nil {
		// Serve has sent GoAway to all that it knew of.
		c.end(link.CodeShutdown, shuttingDown)
	} else if !c.complete || c.coming.missed {
		s.Connected(peer.NodeID)
	}
	// From here on the connection's own end is what counts: a hub that stops still sends GoAway, and takes what it was
	// told.
	stopping := ctx.Done()
	ctx = context.WithoutCancel(ctx)
	err = c.run(ctx)
	s.unregister(c)
	log.InfoContext(ctx, "node disconnected", slog.Uint64("session_no", c.held.SessionNo), slog.Any("reason", err))
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	select {
	case <-stopping:
		return // all go, and Serve says so
	default:
	}
	if err := s.Intake.Gone(ctx, peer.NodeID, c.held.SessionNo); err != nil {
		log.WarnContext(ctx, "end of session not recorded", slog.Any("error", err))
	}
}

const shuttingDown = "the hub is shutting down"

// open waits for the hello and answers it.
func (s *Server) open(ctx context.Context, conn *link.Conn, peer Peer, log *slog.Logger) (*connection, error) {
	stream, hello, err := s.awaitHello(ctx, conn)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	deadline, _ := ctx.Deadline()
	_ = stream.SetDeadline(deadline)
	coming := s.arrive(peer.NodeID)
	opened, err := s.Intake.Hello(ctx, peer, hello)
	conn.Settle()
	if err != nil {
		s.arrived(peer.NodeID, coming)
		s.refuse(conn, stream, err)
		return nil, err
	}
	c := &connection{
		server: s, peer: peer, conn: conn, control: stream, out: newOutbox(), log: log,
		held: HeldBy(hello), incarnation: hello.GetIncarnation(), messageBytes: protocol.MaxReportBytes(opened.Members),
		complete: opened.Complete, coming: coming,
	}
	c.held.SessionNo = opened.SessionNo
	c.uploaded = make(chan struct{})
	c.uploadDone = sync.OnceFunc(func() { close(c.uploaded) })
	if !opened.Welcome.GetRequestStateUpload() {
		c.uploadDone()
	}
	if err := stream.Send(&protocol.HubMessage{Message: &protocol.HubMessage_Welcome{
		Welcome: opened.Welcome,
	}}); err != nil {
		s.arrived(peer.NodeID, coming)
		return nil, err
	}
	failpoint.Hit("hub/hello/welcomed")
	_ = stream.SetDeadline(time.Time{})
	return c, nil
}

// awaitHello reads the first message of a connection.
func (s *Server) awaitHello(ctx context.Context, conn *link.Conn) (*link.Stream, *protocol.Hello, error) {
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	stream, header, err := conn.Accept(ctx)
	if err != nil {
		_ = conn.Close(link.CodeProtocol, "no hello")
		return nil, nil, err
	}
	if header.GetKind() != protocol.StreamHeader_KIND_CONTROL {
		_ = conn.Close(link.CodeProtocol, "the first stream must be the control stream")
		return nil, nil, errors.New("first stream is not control")
	}
	deadline, _ := ctx.Deadline()
	_ = stream.SetDeadline(deadline)
	first := &protocol.NodeMessage{}
	if err := stream.Receive(first, protocol.MaxHelloBytes); err != nil {
		_ = conn.Close(link.CodeProtocol, "no hello")
		return nil, nil, err
	}
	hello := first.GetHello()
	if hello == nil || hello.GetProtocolVersion() == 0 {
		_ = conn.Close(link.CodeProtocol, "the first message must be hello")
		return nil, nil, errors.New("first message is not hello")
	}
	return stream, hello, nil
}

// refuse tells the node why it is not let in and gives it a moment to read that.
func (s *Server) refuse(conn *link.Conn, stream *link.Stream, err error) {
	f := fault.As(err)
	code := link.CodeUnavailable
	switch f.Kind {
	case fault.Forbidden:
		code = link.CodeBanned
	case fault.Malformed, fault.Unprocessable, fault.NotFound, fault.Unauthenticated:
		code = link.CodeProtocol
	default:
	}
	if stream.Send(&protocol.HubMessage{Message: &protocol.HubMessage_GoAway{GoAway: &protocol.GoAway{
		Reason: f.Code,
	}}}) == nil {
		_ = stream.CloseWrite()
		// The node closes when it has read the farewell; closing first could outrun it. The stream's deadline bounds the
		// wait.
		_ = stream.Receive(&protocol.NodeMessage{}, protocol.MaxHelloBytes)
	}
	_ = conn.Close(code, f.Code)
}

// arrival is a connection whose hello is being answered. missed is set when somebody has asked meanwhile what its node
// holds, and was told that it is not there.
type arrival struct{ missed bool }

func (s *Server) arrive(nodeID string) *arrival {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := &arrival{}
	s.opening[nodeID] = append(s.opening[nodeID], a)
	return a
}

// arrived ends what arrive began; the connection is there, or it has failed.
func (s *Server) arrived(nodeID string, a *arrival) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget(nodeID, a)
}

// forget is arrived where mu is held.
func (s *Server) forget(nodeID string, a *arrival) {
	left := slices.DeleteFunc(s.opening[nodeID], func(other *arrival) bool { return other == a })
	if s.opening[nodeID] = left; len(left) == 0 {
		delete(s.opening, nodeID)
	}
}

// register makes c the connection of its node, and ends an older one.
func (s *Server) register(c *connection) bool {
	s.mu.Lock()
	s.forget(c.peer.NodeID, c.coming)
	older := s.nodes[c.peer.NodeID]
	if older != nil && older.held.SessionNo > c.held.SessionNo {
		s.mu.Unlock()
		return false
	}
	s.nodes[c.peer.NodeID] = c
	s.mu.Unlock()
	if older != nil {
		older.end(link.CodeSuperseded, "a newer connection of this node is open")
	}
	return true
}

func (s *Server) unregister(c *connection) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.nodes[c.peer.NodeID] == c {
		delete(s.nodes, c.peer.NodeID)
	}
}
