package netem

import (
	"errors"
	"net"
	"net/netip"
	"time"
)

const (
	// chunkBytes is what is passed on of a connection at once.
	chunkBytes = 16 << 10
	// retransmission is how long a chunk takes longer when the network loses it: TCP sends it again (RFC 6298, the least
	// timeout on Linux).
	retransmission = 200 * time.Millisecond
	// waiting bounds the chunks under way in one direction; the sender is held up beyond.
	waiting = 256
	// dialTimeout bounds the connection to the hub.
	dialTimeout = 5 * time.Second
)

func (p *Proxy) serveTCP() {
	for {
		conn, err := p.tcp.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue
		}
		from, err := netip.ParseAddrPort(conn.RemoteAddr().String())
		if err != nil {
			_ = conn.Close()
			continue
		}
		l := p.link(from.Addr())
		l.mu.Lock()
		l.connects = append(l.connects, time.Now())
		l.mu.Unlock()
		p.running.Go(func() { l.carry(conn) })
	}
}

// carry joins a connection of the node with one to the hub. While the link is cut nothing of it passes; a side that
// waits long enough goes on afterwards, as TCP does.
func (l *Link) carry(node net.Conn) {
	if !l.keep(node) {
		return
	}
	defer l.drop(node)
	if !l.awaitUncut(&l.up) {
		return
	}
	var hub net.Conn
	err := Within(l.p.cfg.NetNS, func() (err error) {
		hub, err = net.DialTimeout("tcp", l.p.cfg.HubTCP, dialTimeout)
		return err
	})
	if err != nil || !l.keep(hub) {
		return
	}
	defer l.drop(hub)
	ended := make(chan struct{}, 2)
	l.p.running.Go(func() { l.copy(hub, node, &l.up); ended <- struct{}{} })
	l.p.running.Go(func() { l.copy(node, hub, &l.down); ended <- struct{}{} })
	<-ended
	<-ended
}

// chunk is what was read, and when it may be written.
type chunk struct {
	data []byte
	at   time.Time
}

// copy passes on what from sends, each chunk at its time and in order.
func (l *Link) copy(to, from net.Conn, w *way) {
	chunks := make(chan chunk, waiting)
	l.p.running.Go(func() {
		defer close(chunks)
		for {
			data := make([]byte, chunkBytes)
			n, err := from.Read(data)
			if n > 0 {
				chunks <- chunk{data[:n], time.Now().Add(l.lateness(w))}
			}
			if err != nil {
				return
			}
		}
	})
	broken := false
	for c := range chunks {
		if broken {
			continue
		}
		time.Sleep(time.Until(c.at))
		if !l.awaitUncut(w) {
			broken = true
			_ = from.Close()
			continue
		}
		if _, err := to.Write(c.data); err != nil {
			broken = true
			_ = from.Close()
		}
	}
	// The end is passed on like a byte.
	if half, ok := to.(*net.TCPConn); ok {
		_ = half.CloseWrite()
	}
}

// lateness is how much later a chunk arrives.
func (l *Link) lateness(w *way) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	uncut := w.conditions
	uncut.Cut = false
	arrivals := w.fate.next(uncut)
	if len(arrivals) == 0 {
		return uncut.Delay + retransmission
	}
	return arrivals[0]
}

// awaitUncut waits while the direction is cut; false when the proxy ends.
func (l *Link) awaitUncut(w *way) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for w.conditions.Cut && !l.closed {
		l.changed.Wait()
	}
	return !l.closed
}

func (l *Link) keep(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		_ = c.Close()
		return false
	}
	l.conns[c] = struct{}{}
	return true
}

func (l *Link) drop(c net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.conns, c)
	_ = c.Close()
}
