// Package link carries streams of messages between a hub and a node over QUIC with TLS 1.3 and certificates on both
// sides. It owns framing, keepalive, windows and stream caps, and with its package admission is the only user of
// quic-go. What the messages mean is not its business.
package link

import (
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/quic-go/quic-go"

	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link/admission"
)

// Limits of one connection. They bound what one authenticated peer can make the other side hold.
const (
	// KeepAlive and IdleTimeout: a dead peer is noticed within IdleTimeout, a NAT binding is refreshed every KeepAlive.
	KeepAlive   = 15 * time.Second
	IdleTimeout = 45 * time.Second
	// ProbeEvery is how often the dialling side asks the listener whether it still knows the connection. A listener that
	// was killed and started again answers with a reset, if it has the ResetKey of its predecessor.
	ProbeEvery = 5 * time.Second
	// probeBytes makes a probe larger than 42 bytes on the wire: quic-go answers nothing smaller with a reset, and its own
	// keepalive is smaller.
	probeBytes = 32
	// connectionIDBytes is long enough that the connections of a listener and of its successor share no id, because a
	// reset shows the secret of its id to the network (RFC 9000, section 10.3.2).
	connectionIDBytes = 8
	// packetBytes is what every path of QUIC takes (RFC 9000, section 14). Larger packets follow where the path proves to
	// take them: quic-go's own first packets are lost in a tunnel of 1280 bytes, and every dial with them.
	packetBytes = 1200
	// HandshakeTimeout bounds a dial. Without an answer it ends after half of that.
	HandshakeTimeout = 10 * time.Second
	// MaxPeerStreams is how many streams the peer may have open; it waits in Open beyond that.
	MaxPeerStreams = 64
	// StreamWindowBytes is what a stream may hold unread.
	streamWindowInitialBytes = 64 << 10
	StreamWindowBytes        = 1 << 20
	// The connection's window holds every stream's, so that unread streams cannot starve the others.
	connWindowBytes = MaxPeerStreams * StreamWindowBytes
	// headerTimeout is how long a new stream may take to send its header.
	headerTimeout = 10 * time.Second
	// MaxPendingConns is how many connections one peer may have between handshake and ReleaseSlot. The listener closes
	// those beyond.
	MaxPendingConns = 2
	// maxReasonBytes bounds what is shown to the peer on close.
	maxReasonBytes = 256
)

// Codes that a connection is closed with. They are for logs: a node dials again after every code.
const (
	CodeOK          uint64 = 0
	CodeProtocol    uint64 = 1
	CodeSuperseded  uint64 = 2
	CodeBanned      uint64 = 3
	CodeShutdown    uint64 = 4
	CodeUnavailable uint64 = 5
)

// streamCanceled is the code of a stream whose reader or writer has lost interest.
const streamCanceled quic.StreamErrorCode = 1

// badCertificate is TLS's alert bad_certificate (RFC 8446, section 6) as a code of QUIC (RFC 9001, section 4.8).
const badCertificate quic.TransportErrorCode = 0x100 + 42

// ErrClosed is what Accept and Open return once the connection or the listener is closed.
var ErrClosed = errors.New("link: closed")

// Conn is one connection to an authenticated peer. All methods may be called at the same time.
type Conn struct {
	qc *quic.Conn
	// life is the connection's own context; its cause is why the connection ended.
	life     context.Context
	accepted chan acceptedStream
	// notPending takes an accepted connection off the pending ones of its peer; nil on the dialling side.
	notPending func()
}

type acceptedStream struct {
	stream *Stream
	header *protocol.StreamHeader
}

// ResetKey is what a listener's stateless resets (RFC 9000, section 10.3) and its callers' tokens are made from. It is
// secret, and the same for a listener and its successor at the same address.
type ResetKey [32]byte

// tokenKey encrypts the tokens, so that a successor knows them.
func (k *ResetKey) tokenKey() *quic.TokenGeneratorKey {
	if k == nil {
		return nil
	}
	mac := hmac.New(sha256.New, k[:])
	mac.Write([]byte("gpuaas address validation tokens"))
	return (*quic.TokenGeneratorKey)(mac.Sum(nil))
}

// Listener takes connections on one UDP port.
type Listener struct {
	ql        *quic.Listener
	transport *quic.Transport
	socket    net.PacketConn

	// admission is nil on a simulated socket.
	admission *admission.Socket

	starting  sync.Once
	accepting sync.WaitGroup
	accepted  chan *Conn
	pending   pendingConns
	// closing is closed with the listener, accepted when nothing more comes; failed is why, unless it was closed.
	closing chan struct{}
	failing sync.Once
	failed  error
	closed  func()
}

// Listen takes connections on addr (host:port, UDP; port 0 for any). tlsConf comes from ServerTLS. Without a reset key
// the peers of a listener that was killed wait for IdleTimeout.
func Listen(addr string, tlsConf *tls.Config, reset *ResetKey) (*Listener, error) {
	udp, err := net.ResolveUDPAddr("udp", addr)
	if err != nil {
		return nil, fmt.Errorf("link: listen on %s (UDP): %w", addr, err)
	}
	socket, err := net.ListenUDP("udp", udp)
	if err != nil {
		return nil, fmt.Errorf("link: listen on %s (UDP): %w", addr, err)
	}
	return ListenOn(socket, tlsConf, reset)
}

// ListenOn is Listen on a socket that the caller has bound, which it takes over. Only one of UDP has admission.
func ListenOn(socket net.PacketConn, tlsConf *tls.Config, reset *ResetKey) (*Listener, error) {
	l := &Listener{socket: socket, accepted: make(chan *Conn), closing: make(chan struct{})}
	l.closed = sync.OnceFunc(func() { close(l.closing) })
	l.transport = &quic.Transport{
		Conn: socket, ConnectionIDLength: connectionIDBytes,
		StatelessResetKey: (*quic.StatelessResetKey)(reset), TokenGeneratorKey: reset.tokenKey(),
	}
	if udp, ok := socket.(*net.UDPConn); ok {
		l.admission = admission.New(udp)
		l.admission.Attach(l.transport)
	}
	var err error
	if l.ql, err = l.transport.Listen(tlsConf, config()); err != nil {
		return nil, errors.Join(fmt.Errorf("link: listen on %s (UDP): %w", socket.LocalAddr(), err), l.transport.Close(),
			socket.Close())
	}
	return l, nil
}

// acceptAll takes connections out of quic-go's queue. The queue is short, and quic-go refuses a connection that finds
// it full after all the work of its handshake. Each goroutine that accepts makes it longer by one; there is one for
// each slot.
func (l *Listener) acceptAll(ctx context.Context) {
	for {
		qc, err := l.ql.Accept(ctx)
		if err != nil {
			if !errors.Is(err, quic.ErrServerClosed) {
				l.failing.Do(func() { l.failed = fmt.Errorf("link: accept: %w", err) })
			}
			return
		}
		if l.admission != nil {
			l.admission.HandshakeDone(qc.RemoteAddr())
		}
		done, ok := l.pending.add(qc.Context(), peerName(qc)) //nolint:contextcheck // the connection's own life counts
		if !ok {
			_ = qc.CloseWithError(quic.ApplicationErrorCode(CodeUnavailable), "two other connections of this peer are on "+
				"their way in")
			continue
		}
		c := newConn(qc)
		c.notPending = done
		go c.takeProbes()
		select {
		case l.accepted <- c:
		case <-l.closing:
			return // its transport will be closed
		}
	}
}

// Accept returns the next connection whose peer is authenticated. Call it in a loop that does nothing else: dials
// beyond the queue behind it are refused.
func (l *Listener) Accept(ctx context.Context) (*Conn, error) {
	l.starting.Do(func() {
		forever := context.WithoutCancel(ctx) // until the listener is closed
		acceptors := 1
		if l.admission != nil {
			acceptors = l.admission.Start()
		}
		for range acceptors {
			l.accepting.Go(func() { l.acceptAll(forever) })
		}
		go func() {
			l.accepting.Wait()
			close(l.accepted)
		}()
	})
	select {
	case c, ok := <-l.accepted:
		if !ok {
			return nil, cmp.Or(l.failed, ErrClosed)
		}
		return c, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("link: accept: %w", ctx.Err())
	}
}

// Addr is the address that it listens on.
func (l *Listener) Addr() net.Addr { return l.ql.Addr() }

// Stop takes no more connections; those that are there live on. Dials are not answered, so that they wait for a
// successor.
func (l *Listener) Stop() error {
	l.closed()
	if l.admission != nil {
		l.admission.Stop()
	}
	return l.ql.Close()
}

// Close stops listening and frees the port. Close accepted connections first: their peers would notice only when a
// successor answers their probes, or after IdleTimeout.
func (l *Listener) Close() error {
	l.closed()
	if l.admission != nil {
		l.admission.Stop()
	}
	return errors.Join(l.ql.Close(), l.transport.Close(), l.socket.Close())
}

func newConn(qc *quic.Conn) *Conn {
	c := &Conn{qc: qc, life: qc.Context(), accepted: make(chan acceptedStream)}
	go c.acceptLoop()
	return c
}

// probe sends datagrams without meaning, which the peer must acknowledge. For a peer of a release without datagrams the
// keepalive must do.
func (c *Conn) probe() {
	tick := time.NewTicker(ProbeEvery)
	defer tick.Stop()
	for {
		select {
		case <-c.life.Done():
			return
		case <-tick.C:
			if err := c.qc.SendDatagram(make([]byte, probeBytes)); err != nil {
				return
			}
		}
	}
}

// takeProbes drops them; unread they would be kept.
func (c *Conn) takeProbes() {
	for {
		if _, err := c.qc.ReceiveDatagram(c.life); err != nil {
			return
		}
	}
}

// acceptLoop reads each new stream's header on its own goroutine (at most MaxPeerStreams of them): a stream whose
// header does not come must not keep the next one waiting.
func (c *Conn) acceptLoop() {
	for {
		qs, err := c.qc.AcceptStream(c.life)
		if err != nil {
			return
		}
		go c.readHeader(newStream(qs))
	}
}

func (c *Conn) readHeader(s *Stream) {
	header := new(protocol.StreamHeader)
	_ = s.SetReadDeadline(time.Now().Add(headerTimeout))
	if err := s.Receive(header, protocol.MaxHeaderBytes); err != nil {
		s.Abort()
		return
	}
	_ = s.SetReadDeadline(time.Time{})
	s.prioritise(header.GetKind())
	select {
	case c.accepted <- acceptedStream{s, header}:
	case <-c.life.Done():
	}
}

// Open opens a stream and sends its header. It waits while the peer's MaxPeerStreams are in use.
func (c *Conn) Open(ctx context.Context, header *protocol.StreamHeader) (*Stream, error) {
	qs, err := c.qc.OpenStreamSync(ctx)
	if err != nil {
		return nil, fmt.Errorf("link: open stream: %w", err)
	}
	s := newStream(qs)
	s.prioritise(header.GetKind())
	if err := s.Send(header); err != nil {
		s.Abort()
		return nil, err
	}
	return s, nil
}

// Accept returns the next stream that the peer opened, with its header.
func (c *Conn) Accept(ctx context.Context) (*Stream, *protocol.StreamHeader, error) {
	select {
	case a := <-c.accepted:
		return a.stream, a.header, nil
	case <-c.life.Done():
		return nil, nil, fmt.Errorf("%w: %w", ErrClosed, c.Err())
	case <-ctx.Done():
		return nil, nil, ctx.Err()
	}
}

// PeerCertificates is the chain that the peer showed and that was verified, its own certificate first.
func (c *Conn) PeerCertificates() []*x509.Certificate {
	return c.qc.ConnectionState().TLS.PeerCertificates
}

// RemoteAddr is the peer's address; it may change while a connection lives.
func (c *Conn) RemoteAddr() net.Addr { return c.qc.RemoteAddr() }

// LocalAddr is the own address.
func (c *Conn) LocalAddr() net.Addr { return c.qc.LocalAddr() }

// OneWay is about how long a packet takes to the other side: half of what QUIC has measured for both ways.
func (c *Conn) OneWay() time.Duration { return c.qc.ConnectionStats().SmoothedRTT / 2 }

// Close ends the connection and all its streams; the peer sees code and reason. What was sent and not yet received may
// be lost.
func (c *Conn) Close(code uint64, reason string) error {
	if len(reason) > maxReasonBytes {
		reason = reason[:maxReasonBytes]
	}
	return c.qc.CloseWithError(quic.ApplicationErrorCode(code), reason)
}

// ReleaseSlot frees the connection's admission slot for another dial, once the peer is let in or refused. A connection
// that ends frees its slot by itself.
func (c *Conn) ReleaseSlot() {
	if c.notPending != nil {
		c.notPending()
	}
	admission.Release(c.life)
}

// Done is closed when the connection is.
func (c *Conn) Done() <-chan struct{} { return c.life.Done() }

// Err says why the connection ended; nil while it lives.
func (c *Conn) Err() error { return context.Cause(c.life) }

// CloseCode returns the code that the connection was closed with by either side's Close.
func CloseCode(err error) (code uint64, ok bool) {
	if app, is := errors.AsType[*quic.ApplicationError](err); is {
		return uint64(app.ErrorCode), true
	}
	return 0, false
}

// IsCertificateRefused reports whether a dial or its connection ended because the listener did not accept the own
// certificate. The dial may have returned before: the listener verifies the certificate after the dialler's part of the
// handshake.
func IsCertificateRefused(err error) bool {
	failed, is := errors.AsType[*quic.TransportError](err)
	return is && failed.Remote && failed.ErrorCode == badCertificate
}

// IsPeerUnknown reports whether a dial ended because no authority that the dialler knows vouches for the listener.
func IsPeerUnknown(err error) bool {
	_, is := errors.AsType[x509.UnknownAuthorityError](err)
	return is
}

func config() *quic.Config {
	return &quic.Config{
		HandshakeIdleTimeout:           HandshakeTimeout / 2, // quic-go gives up after twice this
		MaxIdleTimeout:                 IdleTimeout,
		KeepAlivePeriod:                KeepAlive,
		InitialPacketSize:              packetBytes,
		InitialStreamReceiveWindow:     streamWindowInitialBytes,
		MaxStreamReceiveWindow:         StreamWindowBytes,
		InitialConnectionReceiveWindow: connWindowBytes,
		MaxConnectionReceiveWindow:     connWindowBytes,
		MaxIncomingStreams:             MaxPeerStreams,
		MaxIncomingUniStreams:          -1,
		EnableDatagrams:                true,  // for probes
		Allow0RTT:                      false, // a replayed first flight must not reach a handler
	}
}
