package httpapi

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// servedWithin serves a handler with limits of its own and gives a function that dials it.
func servedWithin(t *testing.T, handler http.Handler, limits serveLimits) (dial func() *tls.Conn) {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	return servedOn(t, listener, handler, limits)
}

// servedOn is servedWithin on a listener.
func servedOn(t *testing.T, listener net.Listener, handler http.Handler, limits serveLimits) (dial func() *tls.Conn) {
	t.Helper()
	return servedBy(t, listener, handler, limits, func() (net.Conn, error) {
		return new(net.Dialer).DialContext(t.Context(), "tcp", listener.Addr().String())
	})
}

// servedBy is servedOn where a call to the listener takes what connect does.
func servedBy(t *testing.T, listener net.Listener, handler http.Handler, limits serveLimits,
	connect func() (net.Conn, error),
) (dial func() *tls.Conn) {
	t.Helper()
	cert, roots := certificate(t, "hub")
	conf := TLSConfig(func() (*tls.Certificate, error) { return &cert, nil }, func() *x509.CertPool { return nil })
	conf.SessionTicketsDisabled = true // in a pipe, their write waits for a reader
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- serve(ctx, listener, handler, conf, slog.New(slog.DiscardHandler), limits) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
	return func() *tls.Conn {
		t.Helper()
		conn, err := connect()
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		c := tls.Client(conn, &tls.Config{RootCAs: roots, ServerName: "127.0.0.1", NextProtos: []string{"http/1.1"}})
		require.NoError(t, c.HandshakeContext(t.Context()))
		return c
	}
}

// pipes is a listener whose connections are pipes: in a bubble of synctest, the limits of the hub pass without waiting
// and exactly.
type pipes struct {
	made   chan net.Conn
	closed chan struct{}
	close  func()
}

func newPipes() pipes {
	closed := make(chan struct{})
	return pipes{make(chan net.Conn), closed, sync.OnceFunc(func() { close(closed) })}
}

func (p pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.made:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p pipes) Close() error { p.close(); return nil }
func (pipes) Addr() net.Addr { return &net.TCPAddr{} }

func (p pipes) connect() (net.Conn, error) {
	here, there := net.Pipe()
	p.made <- local{there}
	return here, nil
}

// local is a connection from this machine.
type local struct{ net.Conn }

func (local) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1} }

// TestARequestWhoseBodyNeverComesEndsWithItsConnection waits for the hub to hang up; nothing else ends the read.
func TestARequestWhoseBodyNeverComesEndsWithItsConnection(t *testing.T) {
	registry := openRegistry(t)
	d := newTestAPI(t, stubServer{}, func(c *Config) { c.Registry, c.RegistryCaller = registry, registry.Caller })
	limits := defaultServeLimits()
	for name, c := range map[string]struct {
		request string
		after   time.Duration
		status  int
	}{
		// Refused before the body is read: answered at once, whatever the time limit.
		"no such path":     {"POST /nothing HTTP/1.1", 0, 404},
		"no such method":   {"PUT /api/v1/orgs HTTP/1.1", 0, 405},
		"no credential":    {"POST /api/v1/orgs HTTP/1.1", 0, 401},
		"registry":         {"POST /v2/a/b/blobs/uploads/ HTTP/1.1", 0, 401},
		"form to registry": {"POST /v2/a/b/blobs/uploads/ HTTP/1.1\r\nContent-Type: multipart/form-data", 0, 415},
		"good credential": {
			"POST /api/v1/orgs HTTP/1.1\r\nX-Idempotency-Key: k\r\nAuthorization: Bearer " + goodToken,
			limits.read, 400,
		},
		"open operation":    {"POST /api/v1/nodes/enroll HTTP/1.1", limits.read, 400},
		"probe with a body": {"GET /healthz HTTP/1.1", limits.read, 200},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPipes()
				conn := servedBy(t, p, d, limits, p.connect)()
				began := time.Now()
				_, err := io.WriteString(conn, c.request+"\r\nHost: hub\r\nContent-Length: 100\r\n\r\n")
				require.NoError(t, err)
				r := bufio.NewReader(conn)
				res, err := http.ReadResponse(r, nil)
				require.NoError(t, err)
				require.Equal(t, c.after, time.Since(began))
				require.Equal(t, c.status, res.StatusCode)
				_, err = io.Copy(io.Discard, res.Body)
				require.NoError(t, err)
				require.NoError(t, res.Body.Close())
				_, err = r.ReadByte()
				require.Error(t, err, "the hub hangs up")
			})
		})
	}
}

func TestAnAnswerThatNobodyReadsEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limits := defaultServeLimits()
		ended := make(chan error, 1)
		p := newPipes()
		conn := servedBy(t, p, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			piece := make([]byte, 1<<20)
			for {
				if _, err := w.Write(piece); err != nil {
					ended <- err
					return
				}
			}
		}), limits, p.connect)()
		began := time.Now()
		_, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: hub\r\n\r\n")
		require.NoError(t, err)
		require.Error(t, <-ended)
		require.GreaterOrEqual(t, time.Since(began), limits.write)
	})
}

// deadlines is a connection that remembers which deadlines were set while it was read and written.
type deadlines struct {
	http.ResponseWriter
	read, write           time.Time
	whileRead, whileWrite []bool
}

func (d *deadlines) SetReadDeadline(at time.Time) error  { d.read = at; return nil }
func (d *deadlines) SetWriteDeadline(at time.Time) error { d.write = at; return nil }

func (d *deadlines) Read(p []byte) (int, error) {
	d.whileRead = append(d.whileRead, !d.read.IsZero())
	return copy(p, "abc"), nil
}

func (d *deadlines) Write(p []byte) (int, error) {
	d.whileWrite = append(d.whileWrite, !d.write.IsZero())
	return len(p), nil
}

func (*deadlines) Close() error { return nil }

func TestATransferHasADeadlineForEachPieceAndNoneForTheWhole(t *testing.T) {
	d := &deadlines{ResponseWriter: httptest.NewRecorder(), read: time.Now(), write: time.Now()}
	r := httptest.NewRequest(http.MethodPut, "/v2/", d)
	w, r := transfer(d, r)
	require.True(t, d.read.IsZero())
	require.True(t, d.write.IsZero())
	for range 2 {
		_, err := r.Body.Read(make([]byte, 3))
		require.NoError(t, err)
		_, err = w.Write([]byte("x"))
		require.NoError(t, err)
	}
	require.Equal(t, []bool{true, true}, d.whileRead)
	require.Equal(t, []bool{true, true}, d.whileWrite)
	require.True(t, d.read.IsZero())
	require.True(t, d.write.IsZero())
}

// callers is a listener on which a test calls.
type callers chan net.Conn

// Accept never waits: a connection that was refused must end the test, not hold it up.
func (c callers) Accept() (net.Conn, error) {
	select {
	case conn, ok := <-c:
		if ok {
			return conn, nil
		}
	default:
	}
	return nil, net.ErrClosed
}

func (callers) Close() error   { return nil }
func (callers) Addr() net.Addr { return &net.TCPAddr{} }

type conn struct {
	net.Conn
	from   string
	closed bool
}

func (c *conn) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.ParseIP(c.from), Port: 1} }
func (c *conn) Close() error         { c.closed = true; return nil }

func TestConnectionsAreBoundedByAddressPrefixAndTotal(t *testing.T) {
	calls := make(callers, 1)
	l := newCappedListener(calls, connLimits{address: 4, prefix: 8, total: 12}, slog.New(slog.DiscardHandler))
	call := func(from string) (*conn, *cappedConn) {
		c := &conn{from: from}
		calls <- c
		got, err := l.Accept()
		require.NoError(t, err)
		return c, got.(*cappedConn)
	}
	var open []net.Conn
	flood := func(from string) {
		for range 20 {
			_, got := call(from)
			open = append(open, got)
		}
	}
	oldest, _ := call("192.0.2.1")
	shown, proven := call("192.0.2.1")
	l.prove(proven)
	l.prove(proven)
	flood("192.0.2.1")
	require.True(t, oldest.closed)
	require.False(t, shown.closed, "it has shown a credential")
	require.Equal(t, 4, l.all.open)
	flood("192.0.2.2")
	require.Equal(t, 8, l.all.open)
	flood("192.0.2.3")
	require.Equal(t, 8, l.all.open, "of one prefix")
	flood("2001:db8:1::")
	require.Equal(t, 12, l.all.open)
	flood("203.0.113.1")
	flood("127.0.0.1")
	require.Equal(t, 12, l.all.open, "in all")
	require.False(t, shown.closed)

	// Those with a credential do not take all: three of four.
	var kept []*conn
	for range 20 {
		c, got := call("198.51.100.1")
		l.prove(got)
		kept = append(kept, c)
		open = append(open, got)
	}
	flood("198.51.100.1")
	for i, c := range kept {
		require.Equal(t, i >= 3, c.closed, i)
	}
	for _, c := range append(open, proven) {
		require.NoError(t, c.Close())
		require.NoError(t, c.Close(), "counts once")
	}
	require.Empty(t, l.scopes)
	require.Zero(t, l.all.open)
	require.Zero(t, l.all.proven)
	require.Zero(t, l.all.unproven.Len())
}

// A connection for which no other can make room is closed, and the next caller is served.
func TestAConnectionBeyondTheLimitIsClosed(t *testing.T) {
	calls := make(callers, 2)
	l := newCappedListener(calls, connLimits{}, slog.New(slog.DiscardHandler))
	c := &conn{from: "192.0.2.1"}
	calls <- c
	close(calls)
	_, err := l.Accept()
	require.ErrorIs(t, err, net.ErrClosed)
	require.True(t, c.closed)
}

// Connections that were never shown a credential make room for others, whatever was asked on them.
func TestOnlyACredentialProvesAConnection(t *testing.T) {
	h := newHouse(t)
	l := newCappedListener(nil, connLimits{address: 9, prefix: 9, total: 9}, slog.New(slog.DiscardHandler))
	for _, ask := range []struct {
		path, bearer string
		status       int
		proven       bool
	}{{"/healthz", "", 200, false}, {"/auth/whoami", "nobody's", 401, false}, {"/auth/whoami", h.admin, 200, true}} {
		c := &cappedConn{Conn: &conn{from: "192.0.2.1"}, listener: l}
		_, ok := l.enter(c, "192.0.2.1")
		require.True(t, ok)
		r := httptest.NewRequest(http.MethodGet, "/api/v1"+ask.path, nil)
		if ask.bearer != "" {
			r.Header.Set("Authorization", "Bearer "+ask.bearer)
		}
		w := httptest.NewRecorder()
		h.unchecked.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), connKey{}, c)))
		require.Equal(t, ask.status, w.Code, ask.path)
		require.Equal(t, ask.proven, c.proven.Load(), ask.path)
	}
}
