package admission

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math/big"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/net/ipv4"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// recorder is a UDP socket that records how quic-go uses it. It delivers each batch out of other buffers than it was
// read into, as Socket does.
type recorder struct {
	*net.UDPConn
	batch *ipv4.PacketConn

	mu        sync.Mutex
	batches   int
	otherRead bool
	deadlines []time.Time
}

func (r *recorder) ReadBatch(messages []ipv4.Message, flags int) (int, error) {
	n, err := r.batch.ReadBatch(messages, flags)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.batches++
	for i := range messages[:max(n, 0)] {
		m := &messages[i]
		data, oob := append([]byte(nil), m.Buffers[0][:m.N]...), append([]byte(nil), m.OOB[:m.NN]...)
		clear(m.Buffers[0])
		m.N, m.NN = copy(m.Buffers[0], data), copy(m.OOB, oob)
	}
	return n, err
}

func (r *recorder) noteRead() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.otherRead = true
}

func (r *recorder) ReadFrom(b []byte) (int, net.Addr, error) {
	r.noteRead()
	return r.UDPConn.ReadFrom(b)
}

func (r *recorder) ReadMsgUDP(b, oob []byte) (n, oobn, flags int, addr *net.UDPAddr, err error) {
	r.noteRead()
	return r.UDPConn.ReadMsgUDP(b, oob)
}

func (r *recorder) SetReadDeadline(t time.Time) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.deadlines = append(r.deadlines, t)
	return r.UDPConn.SetReadDeadline(t)
}

func (r *recorder) deadlinesSet() []time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]time.Time(nil), r.deadlines...)
}

// plain is quic-go on loopback without admission.
type plain struct {
	socket    *recorder
	transport *quic.Transport
	listener  *quic.Listener
}

func newPlain(t *testing.T, change func(*quic.Transport)) *plain {
	t.Helper()
	udp, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	socket := &recorder{UDPConn: udp, batch: ipv4.NewPacketConn(udp)}
	transport := &quic.Transport{Conn: socket}
	change(transport)
	listener, err := transport.Listen(serverTLS(t), &quic.Config{})
	require.NoError(t, err)
	t.Cleanup(func() {
		_ = transport.Close()
		_ = udp.Close()
	})
	return &plain{socket, transport, listener}
}

func serverTLS(t *testing.T) *tls.Config {
	t.Helper()
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, pub, key)
	require.NoError(t, err)
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		NextProtos:   []string{"conformance"},
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
	}
}

func (p *plain) dial(t *testing.T, alpn string) (*quic.Conn, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	c, err := quic.DialAddr(ctx, p.socket.LocalAddr().String(), &tls.Config{
		MinVersion: tls.VersionTLS13, NextProtos: []string{alpn},
		InsecureSkipVerify: true, // the certificate is not the subject
	}, &quic.Config{})
	if err == nil {
		t.Cleanup(func() { _ = c.CloseWithError(0, "") })
	}
	return c, err
}

// Socket overrides ReadBatch and SetReadDeadline alone: every packet must pass the one, and only the end of reading the
// other.
func TestConformanceQuicGoReadsBatchesAndSetsADeadlineOnlyToStop(t *testing.T) {
	p := newPlain(t, func(*quic.Transport) {})
	c, err := p.dial(t, "conformance")
	require.NoError(t, err)
	accepted, err := p.listener.Accept(t.Context())
	require.NoError(t, err)
	require.Empty(t, p.socket.deadlinesSet())
	require.NoError(t, accepted.CloseWithError(0, ""))
	<-c.Context().Done()
	require.NoError(t, p.transport.Close())
	set := p.socket.deadlinesSet()
	require.NotEmpty(t, set)
	require.False(t, set[0].IsZero(), "the first call ends the reading")
	require.False(t, p.socket.otherRead, "a packet was read past ReadBatch")
	require.Positive(t, p.socket.batches)
}

// datagram is a long-header packet with random content.
type datagram struct {
	version    uint32
	kind       byte
	tokenBytes int
	size       int
}

func (d datagram) bytes(t *testing.T) []byte {
	t.Helper()
	b := make([]byte, d.size)
	_, err := rand.Read(b)
	require.NoError(t, err)
	b[0] = 0xc3 | d.kind<<4
	b[1], b[2], b[3], b[4] = byte(d.version>>24), byte(d.version>>16), byte(d.version>>8), byte(d.version)
	b[5], b[14] = 8, 8 // lengths of the connection ids
	b[23] = byte(d.tokenBytes)
	at := 24 + d.tokenBytes
	b[at], b[at+1] = 0x44, 0x00 // the length of the rest: 1024
	return b
}

// Socket holds back what parseInitial names. A packet that opens a connection and is not named would bypass it.
func TestConformanceQuicGoOpensConnectionsForInitialPacketsOnly(t *testing.T) {
	opened := make(chan string, 1)
	p := newPlain(t, func(tr *quic.Transport) {
		tr.VerifySourceAddress = func(from net.Addr) bool {
			opened <- from.String()
			return true
		}
	})
	socket, err := net.Dial("udp", p.socket.LocalAddr().String())
	require.NoError(t, err)
	defer func() { require.NoError(t, socket.Close()) }()
	marker, err := net.Dial("udp", p.socket.LocalAddr().String())
	require.NoError(t, err)
	defer func() { require.NoError(t, marker.Close()) }()
	for _, version := range []uint32{quicVersion1, quicVersion2, 0, 2, 0xff00001d} {
		for kind := range byte(4) {
			for _, size := range []int{minInitialBytes - 1, minInitialBytes} {
				for _, tokenBytes := range []int{0, 32} {
					d := datagram{version, kind, tokenBytes, size}
					raw := d.bytes(t)
					_, is := parseInitial(raw)
					_, err := socket.Write(raw)
					require.NoError(t, err)
					// quic-go handles packets in order: once it asks for the marker, it has handled d.
					_, err = marker.Write(datagram{quicVersion1, initialVersion1, 0, minInitialBytes}.bytes(t))
					require.NoError(t, err)
					first := <-opened
					if is {
						require.Equal(t, socket.LocalAddr().String(), first, "%+v", d)
						first = <-opened
					}
					require.Equal(t, marker.LocalAddr().String(), first, "%+v", d)
				}
			}
		}
	}
}

// Every dial asks VerifySourceAddress first. With a Retry it comes back with a valid token, which is not asked about
// again, and then gets its context, which ends with the connection.
func TestConformanceQuicGoAsksForTheAddressThenForAContext(t *testing.T) {
	type key struct{}
	var (
		mu    sync.Mutex
		calls []string
	)
	contexts := make(chan context.Context, 2)
	note := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		calls = append(calls, fmt.Sprintf(format, args...))
	}
	p := newPlain(t, func(tr *quic.Transport) {
		tr.VerifySourceAddress = func(a net.Addr) bool {
			note("verify %T", a)
			return true
		}
		tr.ConnContext = func(ctx context.Context, info *quic.ClientInfo) (context.Context, error) {
			note("context %T %t", info.RemoteAddr, info.AddrVerified)
			contexts <- ctx
			return context.WithValue(ctx, key{}, "slot"), nil
		}
	})
	c, err := p.dial(t, "conformance")
	require.NoError(t, err)
	accepted, err := p.listener.Accept(t.Context())
	require.NoError(t, err)
	mu.Lock()
	// A first flight may have two packets; quic-go asks about each.
	require.Equal(t, []string{"verify *net.UDPAddr", "context *net.UDPAddr true"}, slices.Compact(calls))
	mu.Unlock()
	require.Equal(t, "slot", accepted.Context().Value(key{}))
	ctx := <-contexts
	require.NoError(t, ctx.Err())
	require.NoError(t, c.CloseWithError(0, ""))
	<-ctx.Done()

	_, err = p.dial(t, "another protocol")
	require.Error(t, err)
	<-(<-contexts).Done() // also where the handshake fails
}

func TestConformanceQuicGoRefusesAConnectionWithoutAContext(t *testing.T) {
	p := newPlain(t, func(tr *quic.Transport) {
		tr.ConnContext = func(context.Context, *quic.ClientInfo) (context.Context, error) {
			return nil, errors.New("no slot")
		}
	})
	_, err := p.dial(t, "conformance")
	require.True(t, connectionRefused(err), "%v", err)
}

func connectionRefused(err error) bool {
	refused, is := errors.AsType[*quic.TransportError](err)
	return is && refused.ErrorCode == quic.ConnectionRefused
}

// wasRefused reports whether the server refuses a connection soon after its handshake.
func wasRefused(c *quic.Conn) bool {
	select {
	case <-c.Context().Done():
		return connectionRefused(context.Cause(c.Context()))
	case <-time.After(2 * time.Second):
		return false
	}
}

// slotsBeforeStart is the length of quic-go's queue: it refuses the next connection after its handshake.
func TestConformanceQuicGoQueuesAsManyConnectionsAsThereAreSlotsBeforeStart(t *testing.T) {
	p := newPlain(t, func(*quic.Transport) {})
	for range slotsBeforeStart {
		_, err := p.dial(t, "conformance")
		require.NoError(t, err)
	}
	// The connections are queued a moment after their dials end: one of the next is refused.
	isRefused := false
	for range 5 {
		last, err := p.dial(t, "conformance")
		if err == nil {
			isRefused = wasRefused(last)
		} else {
			isRefused = connectionRefused(err)
		}
		if isRefused {
			break
		}
	}
	require.True(t, isRefused, "quic-go queues more connections")
	for range slotsBeforeStart {
		c, err := p.listener.Accept(t.Context())
		require.NoError(t, err)
		require.NoError(t, c.Context().Err())
	}
}
