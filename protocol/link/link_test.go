package link_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
	"github.com/gpuaas/gpuaas/protocol/link/admission"
)

const domain = "mesh.example"

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type authority struct {
	cert *x509.Certificate
	key  ed25519.PrivateKey
}

func newAuthority(t testing.TB) authority {
	t.Helper()
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test authority"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, pub, key)
	require.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	return authority{cert, key}
}

func (a authority) pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(a.cert)
	return p
}

func (a authority) issue(t testing.TB, id *url.URL) link.Certificate {
	t.Helper()
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{
			x509.ExtKeyUsageClientAuth,
			x509.ExtKeyUsageServerAuth,
		},
		URIs: []*url.URL{id},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, pub, a.key)
	require.NoError(t, err)
	cert := &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
	return func() (*tls.Certificate, error) { return cert, nil }
}

func (a authority) vouchesFor(kind string) link.Peer {
	return link.Peer{Roots: a.pool, TrustDomain: domain, Kind: kind, Now: time.Now}
}

// setup is one hub that listens on loopback and what a well-behaved node dials it with.
type setup struct {
	hubCA, nodeCA authority
	listener      *link.Listener
	node          *tls.Config
}

func newSetup(t testing.TB) *setup {
	t.Helper()
	s := &setup{hubCA: newAuthority(t), nodeCA: newAuthority(t)}
	hub := s.hubCA.issue(t, protocol.HubSPIFFE(domain, "hub-1"))
	var err error
	s.listener, err = link.Listen("127.0.0.1:0", link.ServerTLS(hub, s.nodeCA.vouchesFor(protocol.KindNode)), nil)
	require.NoError(t, err)
	t.Cleanup(func() { _ = s.listener.Close() })
	s.node = link.ClientTLS(s.nodeCA.issue(t, protocol.NodeSPIFFE(domain, "node-1")), s.hubCA.vouchesFor(protocol.KindHub))
	return s
}

func (s *setup) addr() string { return s.listener.Addr().String() }

func deadline(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// named is what the node with that number dials with.
func (s *setup) named(t *testing.T, number int) *tls.Config {
	t.Helper()
	return link.ClientTLS(s.nodeCA.issue(t, protocol.NodeSPIFFE(domain, fmt.Sprintf("node-%d", number))),
		s.hubCA.vouchesFor(protocol.KindHub))
}

// connect returns both ends of a connection.
func (s *setup) connect(t testing.TB) (node, hub *link.Conn) {
	t.Helper()
	return s.connectAs(t, s.node)
}

func (s *setup) connectAs(t testing.TB, as *tls.Config) (node, hub *link.Conn) {
	t.Helper()
	ctx := deadline(t)
	node, err := link.Dial(ctx, s.addr(), as, nil)
	require.NoError(t, err)
	hub, err = s.listener.Accept(ctx)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, node.Close(link.CodeOK, ""))
		require.NoError(t, hub.Close(link.CodeOK, ""))
	})
	return node, hub
}

func (s *setup) open(t testing.TB, node, hub *link.Conn, kind protocol.StreamHeader_Kind) (up, down *link.Stream) {
	t.Helper()
	ctx := deadline(t)
	up, err := node.Open(ctx, &protocol.StreamHeader{Kind: kind, Traceparent: "00-1-2-03"})
	require.NoError(t, err)
	down, header, err := hub.Accept(ctx)
	require.NoError(t, err)
	require.Equal(t, kind, header.GetKind())
	require.Equal(t, "00-1-2-03", header.GetTraceparent())
	return up, down
}

// refused returns why the listener does not let a connection in: it may end one before its dial returns, or after that.
func (s *setup) refused(t *testing.T, conf *tls.Config) error {
	t.Helper()
	ctx := deadline(t)
	conn, err := link.Dial(ctx, s.addr(), conf, nil)
	if err != nil {
		return err
	}
	select {
	case <-conn.Done():
	case <-ctx.Done():
		require.FailNow(t, "the connection stays open")
	}
	return conn.Err()
}

func TestMessagesAndHeadersArriveWhole(t *testing.T) {
	s := newSetup(t)
	node, hub := s.connect(t)
	up, down := s.open(t, node, hub, protocol.StreamHeader_KIND_CONTROL)

	sent := &protocol.Hello{AgentVersion: strings.Repeat("v", 100_000)}
	errs := make(chan error, 1)
	go func() { errs <- up.Send(sent) }()
	got := &protocol.Hello{}
	require.NoError(t, down.Receive(got, protocol.MaxControlBytes))
	require.NoError(t, <-errs)
	require.Equal(t, sent.GetAgentVersion(), got.GetAgentVersion())

	require.NoError(t, up.CloseWrite())
	require.ErrorIs(t, down.Receive(got, protocol.MaxControlBytes), io.EOF)

	id, err := protocol.PeerID(hub.PeerCertificates()[0], domain, protocol.KindNode)
	require.NoError(t, err)
	require.Equal(t, "node-1", id)
}

func TestRawBytesFollowMessages(t *testing.T) {
	s := newSetup(t)
	node, hub := s.connect(t)
	up, down := s.open(t, node, hub, protocol.StreamHeader_KIND_TUNNEL)
	require.NoError(t, up.Send(&protocol.TunnelResponse{}))
	_, err := io.WriteString(up, "raw after the message")
	require.NoError(t, err)
	require.NoError(t, up.Close())

	require.NoError(t, down.Receive(&protocol.TunnelResponse{}, protocol.MaxHeaderBytes))
	rest, err := io.ReadAll(down)
	require.NoError(t, err)
	require.Equal(t, "raw after the message", string(rest))
}

func TestStrangersAreRefused(t *testing.T) {
	s := newSetup(t)
	nodeID, hubPeer := protocol.NodeSPIFFE(domain, "node-1"), s.hubCA.vouchesFor(protocol.KindHub)
	stranger := newAuthority(t)
	late := hubPeer
	late.Now = func() time.Time { return time.Unix(0, 0) }
	noRoots := hubPeer
	noRoots.Roots = func() *x509.CertPool { return nil }
	choosy := hubPeer
	choosy.Allow = func(id string) error { return protocol.Refuse(protocol.Nack_KEY_REVOKED, "%s is banned", id) }
	good := s.nodeCA.issue(t, nodeID)

	for name, c := range map[string]struct {
		conf *tls.Config
		says string
	}{
		"hub of another authority":   {link.ClientTLS(good, stranger.vouchesFor(protocol.KindHub)), "unknown authority"},
		"hub is not the kind wanted": {link.ClientTLS(good, s.hubCA.vouchesFor(protocol.KindNode)), "identity"},
		"hub of another trust domain": {link.ClientTLS(good, link.Peer{
			Roots: s.hubCA.pool, TrustDomain: "other.example",
			Kind: protocol.KindHub, Now: time.Now,
		}), "identity"},
		"hub certificate not yet valid": {link.ClientTLS(good, late), "not yet valid"},
		"no authority known":            {link.ClientTLS(good, noRoots), "no authority"},
		"caller does not allow it":      {link.ClientTLS(good, choosy), "banned"},
		"node of another authority":     {link.ClientTLS(stranger.issue(t, nodeID), hubPeer), "bad certificate"},
		"node shows a hub's certificate": {
			link.ClientTLS(s.nodeCA.issue(t, protocol.HubSPIFFE(domain, "hub-1")), hubPeer),
			"bad certificate",
		},
		"node of another trust domain": {link.ClientTLS(s.nodeCA.issue(t, protocol.NodeSPIFFE("other.example", "node-1")),
			hubPeer), "bad certificate"},
		"node without certificate": {link.ClientTLS(func() (*tls.Certificate, error) {
			return &tls.Certificate{}, nil
		}, hubPeer), "certificate required"},
		"node speaks another application": {withALPN(link.ClientTLS(good, hubPeer), "h3"), "no application protocol"},
	} {
		t.Run(name, func(t *testing.T) {
			err := s.refused(t, c.conf)
			require.ErrorContains(t, err, c.says)
			require.Equal(t, c.says == "bad certificate", link.IsCertificateRefused(err))
		})
	}
}

func withALPN(conf *tls.Config, alpn string) *tls.Config {
	conf.NextProtos = []string{alpn}
	return conf
}

// A node whose battery died comes up in 1970; its time floor, not its clock, judges the hub's certificate.
func TestNodeWithDeadClockDialsByItsTimeFloor(t *testing.T) {
	s := newSetup(t)
	clock := time.Unix(0, 0)
	floor := time.Now()
	peer := s.hubCA.vouchesFor(protocol.KindHub)
	peer.Now = func() time.Time {
		if clock.Before(floor) {
			return floor
		}
		return clock
	}
	conf := link.ClientTLS(s.nodeCA.issue(t, protocol.NodeSPIFFE(domain, "node-1")), peer)
	conn, err := link.Dial(deadline(t), s.addr(), conf, nil)
	require.NoError(t, err)
	require.NoError(t, conn.Close(link.CodeOK, ""))
}

func TestOversizedMessageIsRefusedUnread(t *testing.T) {
	s := newSetup(t)
	node, hub := s.connect(t)
	up, down := s.open(t, node, hub, protocol.StreamHeader_KIND_USAGE)
	require.NoError(t, up.Send(&protocol.Hello{AgentVersion: strings.Repeat("v", 2000)}))
	err := down.Receive(&protocol.Hello{}, 1000)
	require.ErrorIs(t, err, link.ErrTooLarge)

	// The sender learns of it, and the connection lives.
	require.Eventually(t, func() bool {
		_, err := up.Write([]byte{0})
		return err != nil
	}, 10*time.Second, time.Millisecond)
	s.open(t, node, hub, protocol.StreamHeader_KIND_FETCH)
}

func TestStreamThatNobodyReadsDelaysNoOther(t *testing.T) {
	s := newSetup(t)
	node, hub := s.connect(t)

	// All but two of the streams are full to their windows and unread.
	blocked := make(chan struct{}, link.MaxPeerStreams)
	for range link.MaxPeerStreams - 2 {
		up, _ := s.open(t, node, hub, protocol.StreamHeader_KIND_FETCH)
		go func() {
			_, _ = up.Write(make([]byte, 2*link.StreamWindowBytes))
			blocked <- struct{}{}
		}()
	}
	up, down := s.open(t, node, hub, protocol.StreamHeader_KIND_CONTROL)
	for range 100 {
		require.NoError(t, up.Send(&protocol.Hello{AgentVersion: strings.Repeat("v", 10_000)}))
		require.NoError(t, down.Receive(&protocol.Hello{}, protocol.MaxControlBytes))
		require.NoError(t, down.Send(&protocol.Welcome{SessionNo: 7}))
		require.NoError(t, up.Receive(&protocol.Welcome{}, protocol.MaxControlBytes))
	}
	require.Empty(t, blocked, "the unread streams were meant to be blocked")
	require.NoError(t, node.Close(link.CodeOK, ""))
	for range link.MaxPeerStreams - 2 {
		<-blocked
	}
}

func TestCloseCodeReachesThePeer(t *testing.T) {
	s := newSetup(t)
	node, hub := s.connect(t)
	require.NoError(t, hub.Close(link.CodeSuperseded, "a newer session of this node"))
	<-node.Done()
	code, ok := link.CloseCode(node.Err())
	require.True(t, ok)
	require.Equal(t, link.CodeSuperseded, code)
	require.ErrorContains(t, node.Err(), "a newer session")
	_, _, err := node.Accept(deadline(t))
	require.ErrorIs(t, err, link.ErrClosed)
}

func TestSilentSenderLearnsThatNobodyReads(t *testing.T) {
	s := newSetup(t)
	node, hub := s.connect(t)
	up, down := s.open(t, node, hub, protocol.StreamHeader_KIND_TUNNEL)
	select {
	case <-up.Done():
		t.Fatal("the peer reads still")
	default:
	}
	require.NoError(t, down.Close())
	<-up.Done()
}

func TestListenerCloseEndsAccept(t *testing.T) {
	s := newSetup(t)
	errs := make(chan error, 1)
	go func() {
		_, err := s.listener.Accept(deadline(t))
		errs <- err
	}()
	require.NoError(t, s.listener.Close())
	require.ErrorIs(t, <-errs, link.ErrClosed)
}

// A fleet dials at once: quic-go's own queue is shorter, and a listener has fewer slots. Most of them are taken: so no
// handshake takes longer than it may keep its slot, also under the race detector. A dial that found none in time dials
// again, as agents do; none is refused.
func TestDialsBeyondTheListenersSlotsWaitInTheQueueAndAreAllAdmitted(t *testing.T) {
	s := newSetup(t)
	ctx := deadline(t)
	dials := 2 * admission.Slots()
	for i := range admission.SourceSlots(admission.Slots()) - 2 {
		s.connectAs(t, s.named(t, dials+i))
	}
	var dialling errgroup.Group
	for i := range dials {
		as := s.named(t, i)
		dialling.Go(func() error {
			for {
				node, err := link.Dial(ctx, s.addr(), as, nil)
				if err == nil {
					<-node.Done()
					return nil
				}
				if code, closed := link.CloseCode(err); closed && code == link.CodeOK {
					return nil // the hub has closed it before the dial returned
				}
				if slow, ok := errors.AsType[net.Error](err); !ok || !slow.Timeout() || ctx.Err() != nil {
					return err
				}
			}
		})
	}
	accepting, stop := context.WithCancel(ctx)
	var all sync.WaitGroup
	all.Go(func() {
		for hub, err := s.listener.Accept(accepting); err == nil; hub, err = s.listener.Accept(accepting) {
			_ = hub.Close(link.CodeOK, "")
		}
	})
	require.NoError(t, dialling.Wait(), "not one was refused")
	stop()
	all.Wait()
}

// No queued dial begins its handshake before there is a slot: of a connection that released it, or has ended.
func TestDialWaitsInTheQueueWhileAllSlotsOfItsSourceAreTaken(t *testing.T) {
	s := newSetup(t)
	ctx := deadline(t)
	admitted := make(chan *link.Conn, admission.Slots())
	for i := range admission.SourceSlots(admission.Slots()) {
		_, hub := s.connectAs(t, s.named(t, i))
		admitted <- hub
	}
	last := s.named(t, admission.Slots())
	waits := func() {
		short, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
		defer cancel()
		_, err := link.Dial(short, s.addr(), last, nil)
		require.ErrorIs(t, err, context.DeadlineExceeded)
	}
	waits()
	(<-admitted).ReleaseSlot()
	s.connectAs(t, s.named(t, admission.Slots()+1))
	waits()
	require.NoError(t, (<-admitted).Close(link.CodeOK, ""))
	s.connectAs(t, last)
}

// A hub that goes away lets its nodes finish, and those that dial meanwhile wait for the next hub instead of being
// refused.
func TestStoppedListenerKeepsItsConnectionsAndAnswersNoDial(t *testing.T) {
	s := newSetup(t)
	node, hub := s.connect(t)
	require.NoError(t, s.listener.Stop())
	s.open(t, node, hub, protocol.StreamHeader_KIND_CONTROL)
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	_, err := link.Dial(ctx, s.addr(), s.node, nil)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	_, err = s.listener.Accept(deadline(t))
	require.ErrorIs(t, err, link.ErrClosed)
	s.open(t, node, hub, protocol.StreamHeader_KIND_FETCH)
}
