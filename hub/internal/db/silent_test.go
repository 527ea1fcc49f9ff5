package db_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/url"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
)

// machine passes TCP connections on to the tests' PostgreSQL, and can fall silent.
type machine struct {
	t    *testing.T
	mu   sync.Mutex
	open []*net.TCPConn
}

// startMachine returns the machine and the URL of the database behind it.
func startMachine(t *testing.T) (*machine, string) {
	t.Helper()
	u, err := url.Parse(dbtest.PrivateURL(t))
	require.NoError(t, err)
	q := u.Query()
	upstream := filepath.Join(q.Get("host"), ".s.PGSQL.5432")
	q.Del("host")
	q.Set("sslmode", "disable")
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	m := &machine{t: t}
	var passing sync.WaitGroup
	passing.Go(func() {
		for {
			client, err := l.AcceptTCP()
			if err != nil {
				return
			}
			server, err := net.Dial("unix", upstream)
			if err != nil {
				_ = client.Close()
				continue
			}
			m.mu.Lock()
			m.open = append(m.open, client)
			m.mu.Unlock()
			pass := func(to, from net.Conn) {
				_, _ = io.Copy(to, from)
				_ = to.Close()
			}
			passing.Go(func() { pass(client, server) })
			passing.Go(func() { pass(server, client) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		m.mu.Lock()
		for _, c := range m.open {
			_ = c.Close()
		}
		m.mu.Unlock()
		passing.Wait()
	})
	u.Host, u.RawQuery = l.Addr().String(), q.Encode()
	return m, u.String()
}

// cutOff loses every packet to the connections that are open: nothing is acknowledged, and nothing says so.
func (m *machine) cutOff() {
	m.mu.Lock()
	defer m.mu.Unlock()
	drop := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K}}
	for _, c := range m.open {
		raw, err := c.SyscallConn()
		require.NoError(m.t, err)
		require.NoError(m.t, raw.Control(func(fd uintptr) {
			err = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
				&unix.SockFprog{Len: uint16(len(drop)), Filter: &drop[0]})
		}))
		require.NoError(m.t, err)
	}
}

// A primary whose machine lost its power closes no connection. Its successor has the address, or another host of the
// URL; the transactions that were under way begin anew there.
func TestLaw13ADatabaseThatIsCutOffHoldsNoTransaction(t *testing.T) {
	m, at := startMachine(t)
	d, err := db.Open(t.Context(), at)
	require.NoError(t, err)
	t.Cleanup(d.Close)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	attempts := 0
	got, err := db.RunTx(ctx, d, func(tx db.Tx) (int, error) {
		if _, err := tx.Exec(ctx, `SELECT 1`); err != nil {
			return 0, err
		}
		if attempts++; attempts == 1 {
			m.cutOff()
		}
		return db.Value[int](ctx, tx, fmt.Sprintf(`SELECT %d`, attempts))
	})
	require.NoError(t, err)
	require.Equal(t, 2, got, "the second attempt reaches the machine that answers")
}
