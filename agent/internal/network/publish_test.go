package network_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/network"
)

// two are the attachments of two copies of a service; the first has the port.
func two(f *fixture) (old, next network.Attachment) {
	f.t.Helper()
	old, next = f.setup("m1@app", tcp(21001, 8080)), f.setup("m1@app.aa")
	for name, a := range map[string]network.Attachment{"old": old, "next": next} {
		listen(f.t, a.NetNSPath, ":8080", func(c net.Conn) {
			_, _ = fmt.Fprint(c, name)
			_, _ = io.Copy(c, c)
		})
	}
	return old, next
}

func TestAPortMovesToTheNextCopyAndOpenConnectionsStay(t *testing.T) {
	f := newFixture(t)
	two(f)
	c, err := net.DialTimeout("tcp4", "127.0.0.1:21001", reachable)
	require.NoError(t, err)
	buf := make([]byte, 16)
	n, err := c.Read(buf)
	require.NoError(t, err)
	require.Equal(t, "old", string(buf[:n]))

	require.NoError(t, f.n.Publish(ctxOf(t), "m1@app.aa", []network.PortMapping{tcp(21001, 8080)}))
	answer, err := call(t, "", "127.0.0.1:21001", reachable)
	require.NoError(t, err)
	require.Equal(t, "next", answer)
	_, err = fmt.Fprint(c, "still")
	require.NoError(t, err)
	n, err = c.Read(buf)
	require.NoError(t, err)
	require.Equal(t, "still", string(buf[:n]))

	// What was moved stays so, also for the next agent, and the first copy can be removed.
	restored, err := f.n.EnsureRules(ctxOf(t))
	require.NoError(t, err)
	require.False(t, restored)
	began := time.Now()
	require.NoError(t, f.n.Drain(ctxOf(t), "m1@app", 300*time.Millisecond))
	require.GreaterOrEqual(t, time.Since(began), 300*time.Millisecond, "a connection is open")
	require.NoError(t, c.Close())
	require.NoError(t, f.n.Drain(ctxOf(t), "m1@app", time.Hour))
	require.NoError(t, f.n.Remove(ctxOf(t), "m1@app"))
	f.n = f.open()
	_, err = f.n.EnsureRules(ctxOf(t))
	require.NoError(t, err)
	require.False(t, f.n.PortFree("m2", 21001))
	answer, err = call(t, "", "127.0.0.1:21001", reachable)
	require.NoError(t, err)
	require.Equal(t, "next", answer)
}

// A client that has sent all may still wait for its answer.
func TestAConnectionThatOneSideHasClosedIsDrained(t *testing.T) {
	f := newFixture(t)
	a := f.setup("m1@app", tcp(21001, 8080))
	answer := make(chan struct{})
	listen(t, a.NetNSPath, ":8080", func(c net.Conn) {
		_, _ = io.Copy(io.Discard, c)
		<-answer
		_, _ = fmt.Fprint(c, "answer")
	})
	c, err := net.DialTimeout("tcp4", "127.0.0.1:21001", reachable)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.(*net.TCPConn).CloseWrite())
	began := time.Now()
	require.NoError(t, f.n.Drain(ctxOf(t), "m1@app", 300*time.Millisecond))
	require.GreaterOrEqual(t, time.Since(began), 300*time.Millisecond, "a connection is open")
	close(answer)
	text, err := io.ReadAll(c)
	require.NoError(t, err)
	require.Equal(t, "answer", string(text))
	require.NoError(t, f.n.Drain(ctxOf(t), "m1@app", time.Hour))
}

// A client that connects again and again is never refused, however often the port moves.
func TestNoConnectionIsRefusedWhileAPortMoves(t *testing.T) {
	f := newFixture(t)
	two(f)
	var stop atomic.Bool
	failed := make(chan error, 1)
	go func() {
		for !stop.Load() {
			c, err := net.DialTimeout("tcp4", "127.0.0.1:21001", reachable)
			if err == nil {
				_, err = io.ReadFull(c, make([]byte, 3))
				_ = c.Close()
			}
			if err != nil {
				failed <- err
				return
			}
		}
		failed <- nil
	}()
	for i := range 100 {
		id := []string{"m1@app.aa", "m1@app"}[i%2]
		require.NoError(t, f.n.Publish(ctxOf(t), id, []network.PortMapping{tcp(21001, 8080)}))
	}
	stop.Store(true)
	require.NoError(t, <-failed)
}

func TestACrashWhileAPortMovesLeavesItToTheNextCopy(t *testing.T) {
	f := newFixture(t)
	two(f)
	for _, move := range []struct{ from, to, answer string }{
		{"m1@app", "m1@app.aa", "next"}, {"m1@app.aa", "m1@app", "old"},
	} {
		recordOfFrom := f.cfg.StateDir + "/members/" + move.from + ".json"
		before, err := os.ReadFile(recordOfFrom)
		require.NoError(t, err)
		require.NoError(t, f.n.Publish(ctxOf(t), move.to, []network.PortMapping{tcp(21001, 8080)}))
		// The record of the first copy was not written any more, and the kernel may have either.
		require.NoError(t, os.WriteFile(recordOfFrom, before, 0o600))
		f.n = f.open()
		_, err = f.n.EnsureRules(ctxOf(t))
		require.NoError(t, err)
		answer, err := call(t, "", "127.0.0.1:21001", reachable)
		require.NoError(t, err)
		require.Equal(t, move.answer, answer)
		require.NoError(t, f.n.Publish(ctxOf(t), move.to, []network.PortMapping{tcp(21001, 8080)}))
		var r struct{ Ports []network.PortMapping }
		after, err := os.ReadFile(recordOfFrom)
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(after, &r))
		require.Empty(t, r.Ports)
	}
}

func TestAPortOfAnotherServiceDoesNotMove(t *testing.T) {
	f := newFixture(t)
	f.setup("m1@app", tcp(21001, 8080))
	f.setup("m1@other")
	require.ErrorContains(t, f.n.Publish(ctxOf(t), "m1@other", []network.PortMapping{tcp(21001, 80)}), "21001")
	require.ErrorContains(t, f.n.Publish(ctxOf(t), "m1@none", nil), "not complete")
}
