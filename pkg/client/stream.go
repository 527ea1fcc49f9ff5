package client

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
)

const (
	// streamProtocol is what the hub's connection is upgraded to.
	streamProtocol = "gpuaas-stream"
	// readBufferBytes is what a stream reads ahead.
	readBufferBytes = 128 << 10
)

// Stream is a byte stream to an app, whose two directions end on their own. It fits pkg/duplex.
type Stream struct {
	body    io.ReadWriteCloser
	sockets *socketDialer
	// stop ends the watch over the context.
	stop func() bool
}

// ForwardPort opens a stream to a port of an app instance: one TCP connection of the app. It tries once.
func (h *Hub) ForwardPort(ctx context.Context, projectID, id string, to AppInstancePortForward,
	editors ...RequestEditorFn,
) (*Stream, error) {
	r, err := NewForwardAppInstancePortRequest(h.Server, projectID, id, to)
	if err != nil {
		return nil, err
	}
	return h.openStream(ctx, r, editors)
}

// Exec opens a stream to a command in a container of an app instance; it carries the frames of pkg/execstream. It tries
// once.
func (h *Hub) Exec(ctx context.Context, projectID, id string, command AppInstanceExec,
	editors ...RequestEditorFn,
) (*Stream, error) {
	r, err := NewExecInAppInstanceRequest(h.Server, projectID, id, command)
	if err != nil {
		return nil, err
	}
	return h.openStream(ctx, r, editors)
}

// Copy opens a stream for files of a container of an app instance; it carries the frames of pkg/execstream. It tries
// once.
func (h *Hub) Copy(ctx context.Context, projectID, id string, files AppInstanceCopy,
	editors ...RequestEditorFn,
) (*Stream, error) {
	r, err := NewCopyAppInstanceFilesRequest(h.Server, projectID, id, files)
	if err != nil {
		return nil, err
	}
	return h.openStream(ctx, r, editors)
}

// openStream sends a request on an HTTP/1.1 connection of its own, which becomes the stream. The end of ctx aborts it.
func (h *Hub) openStream(ctx context.Context, r *http.Request, editors []RequestEditorFn) (*Stream, error) {
	sockets := &socketDialer{}
	own := h.transport.base.Clone()
	own.ForceAttemptHTTP2, own.TLSNextProto = false, map[string]func(string, *tls.Conn) http.RoundTripper{}
	own.TLSClientConfig.NextProtos = nil
	own.DialContext = sockets.dial
	t := &transport{conf: h.transport.conf, http: &http.Client{
		Transport: own, CheckRedirect: h.transport.http.CheckRedirect,
	}}
	r = r.WithContext(ctx)
	r.Header.Set("Connection", "Upgrade")
	r.Header.Set("Upgrade", streamProtocol)
	for _, edit := range editors {
		if err := edit(ctx, r); err != nil {
			return nil, err
		}
	}
	t.prepare(r)
	res, err := t.once(r) //nolint:bodyclose // the body is the stream; judge closes that of a refusal
	if err != nil {
		own.CloseIdleConnections()
		return nil, unreachable(r, err)
	}
	if res, err = t.judge(res); err != nil {
		own.CloseIdleConnections()
		return nil, err
	}
	body, ok := res.Body.(io.ReadWriteCloser)
	if res.StatusCode != http.StatusSwitchingProtocols || !ok {
		_ = res.Body.Close()
		sockets.reset()
		return nil, fmt.Errorf("the hub answers %d where a stream begins", res.StatusCode)
	}
	return &Stream{body: body, sockets: sockets, stop: context.AfterFunc(ctx, sockets.reset)}, nil
}

// Read implements io.Reader.
func (s *Stream) Read(p []byte) (int, error) { return s.body.Read(p) }

// Write implements io.Writer.
func (s *Stream) Write(p []byte) (int, error) { return s.body.Write(p) }

// CloseWrite tells the app that nothing more comes; reading goes on.
func (s *Stream) CloseWrite() error {
	if c, ok := s.body.(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return fmt.Errorf("half-close: %w", http.ErrNotSupported)
}

// Close gives the stream back once both directions have ended.
func (s *Stream) Close() error {
	s.stop()
	err := s.body.Close()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// Abort ends both directions at once.
func (s *Stream) Abort() {
	s.stop()
	s.sockets.reset()
}

// socketDialer remembers the sockets that it dialled, to reset them.
type socketDialer struct {
	mu      sync.Mutex
	sockets []net.Conn
}

func (d *socketDialer) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := (&net.Dialer{Timeout: dialTimeout}).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sockets = append(d.sockets, conn)
	return bufferedConn{conn, bufio.NewReaderSize(conn, readBufferBytes)}, nil
}

// bufferedConn reads several TLS records by one system call.
type bufferedConn struct {
	net.Conn

	r *bufio.Reader
}

// Read implements net.Conn.
func (c bufferedConn) Read(b []byte) (int, error) { return c.r.Read(b) }

func (d *socketDialer) reset() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range d.sockets {
		if c, ok := s.(*net.TCPConn); ok {
			_ = c.SetLinger(0)
		}
		_ = s.Close()
	}
}
