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
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"
	"golang.org/x/time/rate"

	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

const (
	// helloTimeout bounds the wait for a hello, answerTimeout the wait for its answer.
	helloTimeout  = 3 * time.Second
	answerTimeout = 15 * time.Second
	// writeTimeout bounds the sending of one message: a node that does not read is disconnected and reconnects.
	writeTimeout = 60 * time.Second
	// fetchTimeout bounds one fetch, from its request to the last byte of its answer.
	fetchTimeout = 60 * time.Second
	// tunnelAnswerTimeout bounds how long a node may take to answer a tunnel request.
	tunnelAnswerTimeout = 15 * time.Second
	// maxUsageStreams, maxFetches and maxTunnels bound one connection, maxOrgTunnels the share of one org; streams beyond
	// are aborted, tunnels beyond refused.
	maxUsageStreams = 2
	maxFetches      = 16
	maxTunnels      = 40
	maxOrgTunnels   = 20
	// maxParallelPushes bounds concurrent pushes: unbounded, a push to thousands takes longer for all of them. A writer
	// waits at most pushWait for its turn, so that nodes that do not read cannot delay the others.
	maxParallelPushes = 64
	pushWait          = time.Second
	// messageRate and messageBurst bound the messages of one node's control stream; a node that sends more is read later.
	messageRate  = 10 // a second
	messageBurst = 100
	// messagesPerState is how many messages after a pushed state do not count: its acks and the next reports. So the rate
	// does not slow down tenants.
	messagesPerState = 4
	// segmentEnvelopeBytes is what the envelope of a usage segment may add to its payload.
	segmentEnvelopeBytes = 16 << 10
)

// Session is the answer to a hello.
type Session struct {
	SessionNo uint64
	// Members is how many members the node has. It bounds the size of the session's reports; a node that gets many more
	// members reconnects.
	Members int
	Welcome *protocol.Welcome
}

// Peer is the node at the other end, from its certificate.
type Peer struct {
	NodeID string
	Key    ed25519.PublicKey
	// Address is the IP address that the connection came from.
	Address string
}

// Handler handles what nodes send. Its methods are called from many connections at once, for each connection one
// control message after the other.
type Handler interface {
	// OpenSession answers a hello; an error refuses the node.
	OpenSession(ctx context.Context, peer Peer, hello *protocol.Hello) (Session, error)
	// OnConnect is called when documents can be pushed to the node.
	OnConnect(nodeID string)
	Report(ctx context.Context, peer Peer, sessionNo uint64, report *protocol.Report) error
	Ack(ctx context.Context, nodeID string, ack *protocol.Ack) error
	Nack(ctx context.Context, peer Peer, nack *protocol.Nack) error
	// PullPhases records pulls of images that have entered a phase.
	PullPhases(ctx context.Context, peer Peer, pulls []*protocol.ImagePull) error
	// ServeUsage posts and acknowledges the segments of one usage stream, from the store that the session was opened with.
	// It returns with the stream's error, io.EOF when the node closed it.
	ServeUsage(ctx context.Context, peer Peer, incarnation string, stream UsageStream) error
	StateUpload(ctx context.Context, peer Peer, upload *protocol.StateUpload) error
	// Fetch answers a request for a document; its errors carry a refusal reason.
	Fetch(ctx context.Context, nodeID string, request *protocol.FetchRequest) (*protocol.FetchResponse, error)
	OnDisconnect(ctx context.Context, nodeID string, sessionNo uint64) error
	// OnShutdown is called once when all connections of this process have ended.
	OnShutdown(ctx context.Context) error
}

// UsageStream is a stream of usage segments.
type UsageStream struct{ stream *link.Stream }

// Receive returns the next segment.
func (s UsageStream) Receive() (*protocol.UsageUpload, error) {
	upload := &protocol.UsageUpload{}
	return upload, s.stream.Receive(upload, protocol.MaxSegmentBytes+segmentEnvelopeBytes)
}

// Send sends an acknowledgement. A failure aborts the stream, so that Receive returns; the node sends again what was
// not acknowledged.
func (s UsageStream) Send(ack *protocol.UsageAck) {
	_ = s.stream.SetWriteDeadline(time.Now().Add(writeTimeout))
	if err := s.stream.Send(ack); err != nil {
		s.stream.Abort()
	}
}

// Options are what a Server needs.
type Options struct {
	// Bundle returns the newest trust bundle.
	Bundle func() protocol.Bundle
	// Certificate returns the hub's own.
	Certificate link.Certificate
	// IsDenied reports whether a node is known to be banned or removed: TLS refuses it. The database decides at the hello.
	// It may be nil.
	IsDenied func(nodeID string) bool
	Now      func() time.Time
	Log      *slog.Logger
}

// Server holds the connections of this hub process.
type Server struct {
	Options

	pushes chan struct{}

	mu    sync.Mutex
	nodes map[string]*connection
	// disconnects counts the calls of Disconnect. A connection that is not registered yet may be meant by one.
	disconnects atomic.Uint64
	ended       sync.WaitGroup

	opened, refused metric.Int64Counter
}

// NewServer makes a server without connections.
func NewServer(o Options) *Server {
	s := &Server{Options: o, pushes: make(chan struct{}, maxParallelPushes), nodes: map[string]*connection{}}
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

// TLS is for link.Listen: nodes show a certificate of the current node authority.
func (s *Server) TLS() *tls.Config {
	return link.ServerTLS(s.Certificate, link.Peer{
		Roots:       func() *x509.CertPool { return s.Bundle().NodeCAs() },
		TrustDomain: s.Bundle().TrustDomain(), Kind: protocol.KindNode, Now: s.Now, Allow: s.allow,
	})
}

// errDenied ends the handshake of a node that is banned or removed.
var errDenied = errors.New("the node is banned or was removed")

func (s *Server) allow(nodeID string) error {
	if s.IsDenied != nil && s.IsDenied(nodeID) {
		return errDenied
	}
	return nil
}

// Serve takes connections until ctx ends, then sends GoAway to all and waits for them.
func (s *Server) Serve(ctx context.Context, listener *link.Listener, handler Handler) error {
	var failed error
	for {
		conn, err := listener.Accept(ctx)
		if err != nil {
			if ctx.Err() == nil && !errors.Is(err, link.ErrClosed) {
				failed = err
			}
			break
		}
		s.ended.Go(func() { s.serve(ctx, conn, handler) })
	}
	// First, so that nodes that reconnect at once reach the next hub process.
	_ = listener.Stop()
	for _, c := range s.connections() {
		c.end(link.CodeShutdown, shuttingDown)
	}
	s.ended.Wait()
	s.shutdown(context.WithoutCancel(ctx), handler)
	// Last, because the socket carries the last messages.
	_ = listener.Close()
	return failed
}

// shutdown records the end of all sessions at once: one by one, thousands would delay the end of the process.
func (s *Server) shutdown(ctx context.Context, handler Handler) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	if err := handler.OnShutdown(ctx); err != nil {
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

func (s *Server) find(nodeID string) *connection {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.nodes[nodeID]
}

// Disconnect ends a node's connection and sends it the reason. One whose hello is being answered is closed: its node
// dials again, and the next answer knows why this was called.
func (s *Server) Disconnect(nodeID, reason string) {
	s.disconnects.Add(1) // first: where register does not see it, find sees what register has stored
	if c := s.find(nodeID); c != nil {
		c.end(link.CodeBanned, reason)
	}
}

// AckedState is what a connected node acknowledged that it holds.
type AckedState struct {
	NodeID        string
	SessionNo     uint64
	Incarnation   string
	Epoch         uint64
	Generation    uint64
	StateSHA256   []byte
	BundleVersion uint64
	// LeasesSHA256 is of the leases that were pushed last on this connection.
	LeasesSHA256 []byte
}

func ackedByHello(nodeID string, sessionNo uint64, h *protocol.Hello) AckedState {
	return AckedState{
		NodeID:        nodeID,
		SessionNo:     sessionNo,
		Incarnation:   h.GetIncarnation(),
		Epoch:         h.GetEpoch(),
		Generation:    h.GetGeneration(),
		StateSHA256:   h.GetStateSha256(),
		BundleVersion: h.GetBundleVersion(),
	}
}

// Acked returns what the node holds; ok is false when it is not connected.
func (s *Server) Acked(nodeID string) (acked AckedState, ok bool) {
	c := s.find(nodeID)
	if c == nil {
		return AckedState{}, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.acked, true
}

// PushState sends a state if the node is connected.
func (s *Server) PushState(nodeID string, m *protocol.PushState, generation uint64, sha256 []byte) {
	if c := s.find(nodeID); c != nil {
		c.mu.Lock()
		c.pushedGeneration, c.pushedSHA256 = generation, sha256
		c.mu.Unlock()
		c.out.put(&protocol.HubMessage{Message: &protocol.HubMessage_PushState{PushState: m}})
	}
}

// PushLeases sends a batch of leases if the node is connected. sha256 is of its content without its time.
func (s *Server) PushLeases(nodeID string, m *protocol.PushLeases, sha256 []byte) {
	if c := s.find(nodeID); c != nil {
		c.mu.Lock()
		c.acked.LeasesSHA256 = sha256
		c.mu.Unlock()
		c.out.put(&protocol.HubMessage{Message: &protocol.HubMessage_PushLeases{PushLeases: m}})
	}
}

// PushBundle sends a trust bundle if the node is connected.
func (s *Server) PushBundle(nodeID string, m *protocol.PushBundle) {
	if c := s.find(nodeID); c != nil {
		c.out.put(&protocol.HubMessage{Message: &protocol.HubMessage_PushBundle{PushBundle: m}})
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
	address, _, err := net.SplitHostPort(conn.RemoteAddr().String())
	return Peer{NodeID: id, Key: key, Address: address}, err
}

// serve runs one connection from its first stream to its end.
func (s *Server) serve(ctx context.Context, conn *link.Conn, handler Handler) {
	defer func() { _ = conn.Close(link.CodeOK, "") }()

	peer, err := s.peerOf(conn)
	if err != nil {
		s.Log.WarnContext(ctx, "node without identity", slog.Any("error", err),
			slog.String("address", conn.RemoteAddr().String()))
		_ = conn.Close(link.CodeProtocol, "no usable certificate")
		return
	}
	log := s.Log.With(slog.String("node_id", peer.NodeID))
	c, err := s.open(ctx, conn, handler, peer, log)
	if err != nil {
		s.refused.Add(ctx, 1)
		log.InfoContext(ctx, "session not opened", slog.Any("error", err), slog.String("address", conn.RemoteAddr().String()))
		return
	}
	if !s.register(c) {
		_ = conn.Close(link.CodeSuperseded, "a newer connection of this node is open, or this one was ended")
		return
	}
	failpoint.Hit("hub/session/registered")
	s.opened.Add(ctx, 1)
	log.InfoContext(ctx, "node connected", slog.Uint64("session_no", c.acked.SessionNo),
		slog.String("address", conn.RemoteAddr().String()))
	if ctx.Err() != nil {
		// Serve sent GoAway before this connection was registered.
		c.end(link.CodeShutdown, shuttingDown)
	} else {
		handler.OnConnect(peer.NodeID)
	}
	// From here on ctx does not end the connection: a hub that stops still sends GoAway and handles what it received.
	stopping := ctx.Done()
	ctx = context.WithoutCancel(ctx)
	err = c.run(ctx)
	s.unregister(c)
	log.InfoContext(ctx, "node disconnected", slog.Uint64("session_no", c.acked.SessionNo), slog.Any("reason", err))
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	select {
	case <-stopping:
		return // OnShutdown records it
	default:
	}
	if err := handler.OnDisconnect(ctx, peer.NodeID, c.acked.SessionNo); err != nil {
		log.WarnContext(ctx, "end of session not recorded", slog.Any("error", err))
	}
}

const shuttingDown = "the hub is shutting down"

// open waits for the hello and answers it.
func (s *Server) open(ctx context.Context, conn *link.Conn, handler Handler, peer Peer,
	log *slog.Logger,
) (*connection, error) {
	stream, hello, err := s.awaitHello(ctx, conn)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	deadline, _ := ctx.Deadline()
	_ = stream.SetDeadline(deadline)
	disconnects := s.disconnects.Load()
	session, err := handler.OpenSession(ctx, peer, hello)
	conn.ReleaseSlot()
	if err != nil {
		s.refuse(conn, stream, err)
		return nil, err
	}
	c := &connection{
		handler:      handler,
		disconnects:  disconnects,
		pushes:       s.pushes,
		peer:         peer,
		conn:         conn,
		control:      stream,
		out:          newOutbox(),
		now:          s.Now,
		traces:       rate.NewLimiter(tracesPerSecond, tracesBurst),
		log:          log,
		acked:        ackedByHello(peer.NodeID, session.SessionNo, hello),
		incarnation:  hello.GetIncarnation(),
		messageBytes: protocol.MaxReportBytes(session.Members),
		uploaded:     make(chan struct{}),
	}
	c.uploadDone = sync.OnceFunc(func() { close(c.uploaded) })
	if !session.Welcome.GetRequestStateUpload() {
		c.uploadDone()
	}
	if err := stream.Send(&protocol.HubMessage{Message: &protocol.HubMessage_Welcome{
		Welcome: session.Welcome,
	}}); err != nil {
		return nil, err
	}
	failpoint.Hit("hub/hello/welcome_sent")
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

// refuse sends the node the reason of the refusal and gives it a moment to read it.
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
		Reason: string(f.Code),
	}}}) == nil {
		_ = stream.CloseWrite()
		// The node closes when it has read GoAway; closing first could outrun it. The stream's deadline bounds the
		// wait.
		_ = stream.Receive(&protocol.NodeMessage{}, protocol.MaxHelloBytes)
	}
	_ = conn.Close(code, string(f.Code))
}

// register makes c the connection of its node, and ends an older one. It refuses a connection that is older itself, or
// whose hello may have been answered before a ban.
func (s *Server) register(c *connection) bool {
	s.mu.Lock()
	older := s.nodes[c.peer.NodeID]
	if c.disconnects != s.disconnects.Load() || older != nil && older.acked.SessionNo > c.acked.SessionNo {
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
