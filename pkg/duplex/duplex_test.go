package duplex_test

import (
	"bytes"
	"context"
	"io"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/duplex"
)

// pair returns the two ends of a TCP connection.
func pair(t *testing.T) (near, far *net.TCPConn) {
	t.Helper()
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	near, err = net.DialTCP("tcp4", nil, l.Addr().(*net.TCPAddr))
	require.NoError(t, err)
	far, err = l.AcceptTCP()
	require.NoError(t, err)
	require.NoError(t, l.Close())
	t.Cleanup(func() {
		_ = near.Close()
		_ = far.Close()
	})
	return near, far
}

type joined struct {
	toB, toA int64
	err      error
}

func join(ctx context.Context, a, b *net.TCPConn) <-chan joined {
	done := make(chan joined, 1)
	go func() {
		toB, toA, err := duplex.Join(ctx, duplex.TCP(a), duplex.TCP(b))
		done <- joined{toB, toA, err}
	}()
	return done
}

func TestEachDirectionEndsOnItsOwn(t *testing.T) {
	client, a := pair(t)
	b, server := pair(t)
	done := join(t.Context(), a, b)
	question := bytes.Repeat([]byte("question"), 50_000)
	go func() {
		_, _ = client.Write(question)
		_ = client.CloseWrite()
	}()
	got, err := io.ReadAll(server)
	require.NoError(t, err, "the end of the question is passed on")
	require.Equal(t, question, got)
	_, err = server.Write([]byte("answer"))
	require.NoError(t, err)
	require.NoError(t, server.Close())
	got, err = io.ReadAll(client)
	require.NoError(t, err)
	require.Equal(t, "answer", string(got))
	require.Equal(t, joined{toB: int64(len(question)), toA: int64(len("answer"))}, <-done)
}

func TestAnEndedContextIsNoEndOfTheData(t *testing.T) {
	client, a := pair(t)
	b, server := pair(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := join(ctx, a, b)
	_, err := client.Write([]byte("part"))
	require.NoError(t, err)
	_, err = io.ReadFull(server, make([]byte, len("part")))
	require.NoError(t, err)
	cancel()
	_, err = server.Read(make([]byte, 1))
	require.ErrorContains(t, err, "reset")
	_, err = client.Read(make([]byte, 1))
	require.ErrorContains(t, err, "reset")
	require.ErrorIs(t, (<-done).err, context.Canceled)
}
