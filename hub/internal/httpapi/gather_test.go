package httpapi

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"crypto/tls"
	"io"
	"log/slog"
	"net"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// countedConn counts its writes.
type countedConn struct {
	net.Conn

	writes atomic.Int64
}

func (c *countedConn) Write(b []byte) (int, error) {
	c.writes.Add(1)
	return c.Conn.Write(b)
}

// countingListener accepts one counted connection.
type countingListener struct {
	net.Listener

	conn *countedConn
}

func (l *countingListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	l.conn = &countedConn{Conn: conn}
	return l.conn, err
}

// newTLSStream returns a stream to a caller over TLS, the connection below it, and the caller's end.
func newTLSStream(t *testing.T) (hijackedStream, *countedConn, *tls.Conn) {
	t.Helper()
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = tcp.Close() })
	counting := &countingListener{Listener: tcp}
	cert, roots := certificate(t, "127.0.0.1")
	capped := newCappedListener(counting, connLimits{total: 1}, slog.New(slog.DiscardHandler))
	raw, err := net.Dial("tcp", tcp.Addr().String())
	require.NoError(t, err)
	caller := tls.Client(raw, &tls.Config{RootCAs: roots, ServerName: "127.0.0.1"})
	t.Cleanup(func() { _ = caller.Close() })
	below, err := capped.Accept()
	require.NoError(t, err)
	server := tls.Server(below, &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS13})
	t.Cleanup(func() { _ = server.Close() })
	shaken := make(chan error, 1)
	go func() { shaken <- server.HandshakeContext(t.Context()) }()
	require.NoError(t, caller.HandshakeContext(t.Context()))
	require.NoError(t, <-shaken)
	return newHijackedStream(server, bufio.NewReader(server)), counting.conn, caller
}

func TestAStreamWritesSeveralTLSRecordsAtOnce(t *testing.T) {
	s, below, caller := newTLSStream(t)
	piece := make([]byte, 256<<10)
	_, _ = rand.Read(piece)
	const pieces = 8
	sent := make(chan error, 1)
	before := below.writes.Load()
	go func() {
		for range pieces {
			if _, err := s.Write(piece); err != nil {
				sent <- err
				return
			}
		}
		_, err := s.Write([]byte("end"))
		sent <- err
	}()
	got := make([]byte, pieces*len(piece)+len("end"))
	_, err := io.ReadFull(caller, got)
	require.NoError(t, err)
	require.NoError(t, <-sent)
	require.Equal(t, append(bytes.Repeat(piece, pieces), "end"...), got)
	require.LessOrEqual(t, below.writes.Load()-before, int64(pieces*3+1), "a piece has 16 records and more")

	// What TLS says besides is not kept.
	require.NoError(t, s.CloseWrite())
	_, err = caller.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
}

func TestAStreamsWriteFailsWithItsConnection(t *testing.T) {
	s, _, _ := newTLSStream(t)
	s.Abort()
	_, err := s.Write([]byte("lost"))
	require.Error(t, err)
}
