package httpapi

import (
	lru "container/list"
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
)

// connLimits bounds the open connections: of one address, of one prefix, and of all together. Loopback has no share of
// its own: a proxy or a whole test may stand behind it.
type connLimits struct{ address, prefix, total int }

// provenShare is how many quarters of a limit the connections that have shown a credential may keep for themselves.
const provenShare = 3

// cappedListener bounds the open connections. At a limit it closes the oldest connection that has shown no credential:
// idle connections from a node's address must not keep out the renewal of its certificate.
type cappedListener struct {
	net.Listener
	limits connLimits
	log    *slog.Logger

	mu     sync.Mutex
	scopes map[string]*connScope
	all    *connScope
}

// connScope counts the connections of an address, of a prefix, or all.
type connScope struct {
	key          string
	max          int
	open, proven int
	// unproven are the others, in the order in which they came.
	unproven *lru.List
}

func newCappedListener(l net.Listener, limits connLimits, log *slog.Logger) *cappedListener {
	return &cappedListener{
		Listener: l,
		limits:   limits,
		log:      log,
		scopes:   map[string]*connScope{},
		all:      &connScope{max: limits.total, unproven: lru.New()},
	}
}

// Accept implements net.Listener.
func (l *cappedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		ip := remoteIP(conn.RemoteAddr().String())
		c := &cappedConn{Conn: conn, listener: l}
		evicted, ok := l.enter(c, ip)
		if evicted != nil {
			l.log.Debug("connection made room for a newer one", slog.String("remote_ip", ip))
			_ = evicted.Close()
		}
		if ok {
			return c, nil
		}
		l.log.Debug("connection over the limit", slog.String("remote_ip", ip))
		_ = conn.Close()
	}
}

// enter counts a connection in its scopes. The caller closes evicted, which makes room for it.
func (l *cappedListener) enter(c *cappedConn, ip string) (evicted *cappedConn, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	scopes := l.scopesOf(ip)
	// Each scope lies in the next one: what leaves the first full one leaves all that follow.
	for _, s := range scopes {
		if s.open < s.max {
			continue
		}
		oldest := s.unproven.Front()
		if oldest == nil {
			return nil, false
		}
		evicted = oldest.Value.(*cappedConn) //nolint:forcetypeassert // only these are put in
		l.leave(evicted)
		break
	}
	for _, s := range scopes {
		s.open++
		c.scopes = append(c.scopes, s)
		c.waiting = append(c.waiting, s.unproven.PushBack(c))
		if s != l.all {
			l.scopes[s.key] = s
		}
	}
	return evicted, true
}

// scopesOf gives the scopes of an address, the smallest first.
func (l *cappedListener) scopesOf(ip string) []*connScope {
	if parsed, err := netip.ParseAddr(ip); err == nil && parsed.Unmap().IsLoopback() {
		return []*connScope{l.all}
	}
	address, prefix := prefixes(ip)
	return []*connScope{l.scope(address, l.limits.address), l.scope(prefix, l.limits.prefix), l.all}
}

func (l *cappedListener) scope(key string, most int) *connScope {
	if s := l.scopes[key]; s != nil {
		return s
	}
	return &connScope{key: key, max: most, unproven: lru.New()}
}

// leave removes a connection from its scopes; a second call does nothing.
func (l *cappedListener) leave(c *cappedConn) {
	if c.left {
		return
	}
	c.left = true
	for i, s := range c.scopes {
		s.open--
		if c.proven.Load() {
			s.proven--
		} else {
			s.unproven.Remove(c.waiting[i])
		}
		if s.open == 0 {
			delete(l.scopes, s.key)
		}
	}
}

// prove records that a request on the connection had a credential, unless provenShare is used up.
func (l *cappedListener) prove(c *cappedConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.left || c.proven.Load() {
		return
	}
	for _, s := range c.scopes {
		if s.proven >= s.max*provenShare/4 {
			return
		}
	}
	c.proven.Store(true)
	for i, s := range c.scopes {
		s.proven++
		s.unproven.Remove(c.waiting[i])
	}
}

type cappedConn struct {
	net.Conn
	listener *cappedListener
	proven   atomic.Bool
	// scopes, waiting (its element in each) and left belong to the listener's lock.
	scopes  []*connScope
	waiting []*lru.Element
	left    bool

	writing sync.Mutex
	// gathered holds TLS records until flush; nil writes each at once.
	gathered []byte
}

// gatherBytes is how much a stream's connection gathers: seven TLS records of 16 KiB.
const gatherBytes = 116 << 10

// Write implements net.Conn.
func (c *cappedConn) Write(b []byte) (int, error) {
	c.writing.Lock()
	defer c.writing.Unlock()
	if c.gathered == nil {
		return c.Conn.Write(b)
	}
	if len(c.gathered)+len(b) > gatherBytes {
		if err := c.writeGathered(); err != nil {
			return 0, err
		}
	}
	c.gathered = append(c.gathered, b...)
	return len(b), nil
}

// gather makes Write keep what it gets in buffer, so that the kernel gets several TLS records by one system call.
func (c *cappedConn) gather(buffer []byte) {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.gathered = buffer[:0]
}

// flush writes what is gathered, and ends the gathering.
func (c *cappedConn) flush() error {
	c.writing.Lock()
	defer c.writing.Unlock()
	err := c.writeGathered()
	c.gathered = nil
	return err
}

// writeGathered writes what is gathered. writing is held.
func (c *cappedConn) writeGathered() error {
	_, err := c.Conn.Write(c.gathered)
	c.gathered = c.gathered[:0]
	return err
}

// Close implements net.Conn.
func (c *cappedConn) Close() error {
	c.listener.mu.Lock()
	c.listener.leave(c)
	c.listener.mu.Unlock()
	return c.Conn.Close()
}

type connKey struct{}

// withConn is http.Server's ConnContext: requests find the connection that they came on.
func withConn(ctx context.Context, c net.Conn) context.Context {
	if conn, ok := c.(*tls.Conn); ok {
		c = conn.NetConn()
	}
	if capped, ok := c.(*cappedConn); ok {
		return context.WithValue(ctx, connKey{}, capped)
	}
	return ctx
}

// proveConn records that the request had a valid credential.
func proveConn(r *http.Request) {
	if c, ok := r.Context().Value(connKey{}).(*cappedConn); ok && !c.proven.Load() {
		c.listener.prove(c)
	}
}
