package httpapi

import (
	"log/slog"
	"net"
	"net/netip"
	"sync"
)

// connLimits bounds the open connections: of one address, of one prefix, and of all together. Loopback has no share of its own:
// a proxy or a whole test may stand behind it.
type connLimits struct{ address, prefix, total int }

// cappedListener closes connections beyond the limits at once: whoever holds many keeps out itself, and nobody waits in a queue
// that it fills.
type cappedListener struct {
	net.Listener
	limits connLimits
	log    *slog.Logger

	mu    sync.Mutex
	open  map[string]int
	total int
}

func newCappedListener(l net.Listener, limits connLimits, log *slog.Logger) *cappedListener {
	return &cappedListener{Listener: l, limits: limits, log: log, open: map[string]int{}}
}

// Accept implements net.Listener.
func (l *cappedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		ip := remoteIP(conn.RemoteAddr().String())
		if leave, ok := l.enter(ip); ok {
			return &cappedConn{Conn: conn, leave: leave}, nil
		}
		l.log.Debug("connection over the limit", slog.String("remote_ip", ip))
		_ = conn.Close()
	}
}

func (l *cappedListener) enter(ip string) (leave func(), ok bool) {
	address, prefix := prefixes(ip)
	parsed, err := netip.ParseAddr(ip)
	shared := err == nil && parsed.Unmap().IsLoopback()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.total >= l.limits.total || !shared && (l.open[address] >= l.limits.address || l.open[prefix] >= l.limits.prefix) {
		return nil, false
	}
	l.count(address, prefix, 1)
	return sync.OnceFunc(func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.count(address, prefix, -1)
	}), true
}

func (l *cappedListener) count(address, prefix string, n int) {
	l.total += n
	for _, key := range []string{address, prefix} {
		if l.open[key] += n; l.open[key] == 0 {
			delete(l.open, key)
		}
	}
}

type cappedConn struct {
	net.Conn
	leave func()
}

// Close implements net.Conn.
func (c *cappedConn) Close() error {
	c.leave()
	return c.Conn.Close()
}
