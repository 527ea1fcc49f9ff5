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
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// servedWithin serves a handler with limits of its own and gives a function that dials it.
func servedWithin(t *testing.T, handler http.Handler, limits serveLimits) (dial func() *tls.Conn) {
	t.Helper()
	cert, roots := certificate(t, "hub")
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	conf := TLSConfig(func() (*tls.Certificate, error) { return &cert, nil }, func() *x509.CertPool { return nil })
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- serve(ctx, listener, handler, conf, slog.New(slog.DiscardHandler), limits) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
	return func() *tls.Conn {
		d := tls.Dialer{Config: &tls.Config{RootCAs: roots, ServerName: "127.0.0.1", NextProtos: []string{"http/1.1"}}}
		conn, err := d.DialContext(t.Context(), "tcp", listener.Addr().String())
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		return conn.(*tls.Conn)
	}
}

// TestARequestWhoseBodyNeverComesEndsWithItsConnection waits for the hub to hang up; nothing else ends the read.
func TestARequestWhoseBodyNeverComesEndsWithItsConnection(t *testing.T) {
	registry := openRegistry(t)
	d := newDoor(t, desk{}, func(c *Config) { c.Registry, c.RegistryCaller = registry, registry.Caller })
	patient := defaultServeLimits()
	hasty := defaultServeLimits()
	hasty.read = 100 * time.Millisecond
	for name, c := range map[string]struct {
		request string
		limits  serveLimits
		status  int
	}{
		// Refused before the body is looked at: answered at once, whatever the time limit.
		"no such path":      {"POST /nothing HTTP/1.1", patient, 404},
		"no such method":    {"PUT /api/v1/orgs HTTP/1.1", patient, 405},
		"no credential":     {"POST /api/v1/orgs HTTP/1.1", patient, 401},
		"registry":          {"POST /v2/a/b/blobs/uploads/ HTTP/1.1", patient, 401},
		"form to registry":  {"POST /v2/a/b/blobs/uploads/ HTTP/1.1\r\nContent-Type: multipart/form-data", patient, 415},
		"good credential":   {"POST /api/v1/orgs HTTP/1.1\r\nX-Idempotency-Key: k\r\nAuthorization: Bearer " + goodToken, hasty, 400},
		"open operation":    {"POST /api/v1/nodes/enroll HTTP/1.1", hasty, 400},
		"probe with a body": {"GET /healthz HTTP/1.1", hasty, 200},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conn := servedWithin(t, d, c.limits)()
			_, err := io.WriteString(conn, c.request+"\r\nHost: hub\r\nContent-Length: 100\r\n\r\n")
			require.NoError(t, err)
			r := bufio.NewReader(conn)
			res, err := http.ReadResponse(r, nil)
			require.NoError(t, err)
			require.Equal(t, c.status, res.StatusCode)
			_, err = io.Copy(io.Discard, res.Body)
			require.NoError(t, err)
			require.NoError(t, res.Body.Close())
			_, err = r.ReadByte()
			require.Error(t, err, "the hub hangs up")
		})
	}
}

func TestAnAnswerThatNobodyReadsEnds(t *testing.T) {
	limits := defaultServeLimits()
	limits.write = 100 * time.Millisecond
	ended := make(chan error, 1)
	dial := servedWithin(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		piece := make([]byte, 1<<20)
		for {
			if _, err := w.Write(piece); err != nil {
				ended <- err
				return
			}
		}
	}), limits)
	_, err := io.WriteString(dial(), "GET / HTTP/1.1\r\nHost: hub\r\n\r\n")
	require.NoError(t, err)
	require.Error(t, <-ended)
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

func (c callers) Accept() (net.Conn, error) {
	conn, ok := <-c
	if !ok {
		return nil, net.ErrClosed
	}
	return conn, nil
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
	calls := make(callers, 100)
	l := newCappedListener(calls, connLimits{address: 2, prefix: 3, total: 6}, slog.New(slog.DiscardHandler))
	call := func(from string) (*conn, net.Conn) {
		c, after := &conn{from: from}, &conn{from: "127.0.0.1"}
		calls <- c
		calls <- after
		got, err := l.Accept()
		require.NoError(t, err)
		if c.closed {
			require.NoError(t, got.Close(), "the one after")
			return c, nil
		}
		<-calls
		return c, got
	}
	var open []net.Conn
	for _, from := range []string{"192.0.2.1", "192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8::2"} {
		_, got := call(from)
		require.NotNil(t, got, from)
		open = append(open, got)
	}
	for _, from := range []string{"192.0.2.1", "192.0.2.3", "2001:db8::3"} {
		c, _ := call(from)
		require.True(t, c.closed, from)
	}
	require.NoError(t, open[0].Close())
	require.NoError(t, open[0].Close(), "counts once")
	for _, from := range []string{"192.0.2.3", "198.51.100.1"} {
		_, got := call(from)
		require.NotNil(t, got, from)
		open = append(open, got)
	}
	calls <- &conn{from: "203.0.113.1"}
	close(calls)
	_, err := l.Accept()
	require.ErrorIs(t, err, net.ErrClosed, "over the total")
	for _, c := range open {
		require.NoError(t, c.Close())
	}
	require.Empty(t, l.open)
	require.Zero(t, l.total)
}
