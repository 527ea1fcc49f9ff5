package netem

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// Config holds a proxy's addresses. TCP and UDP may use the same one.
type Config struct {
	// NetNS is the path of the network namespace that it works in; empty for the caller's.
	NetNS string
	// ListenUDP and ListenTCP are the addresses for nodes, HubUDP and HubTCP those of the hub.
	ListenUDP, HubUDP string
	ListenTCP, HubTCP string
	Seed              uint64
}

// Proxy carries packets and connections. Make one with Start.
type Proxy struct {
	cfg Config
	udp *net.UDPConn
	tcp net.Listener

	mu      sync.Mutex
	links   map[netip.Addr]*Link
	closed  bool
	running sync.WaitGroup
}

// Start opens the ports.
func Start(cfg Config) (*Proxy, error) {
	p := &Proxy{cfg: cfg, links: map[netip.Addr]*Link{}}
	err := Within(cfg.NetNS, func() (err error) {
		addr, err := net.ResolveUDPAddr("udp", cfg.ListenUDP)
		if err != nil {
			return err
		}
		if p.udp, err = net.ListenUDP("udp", addr); err != nil {
			return err
		}
		if p.tcp, err = net.Listen("tcp", cfg.ListenTCP); err != nil {
			return errors.Join(err, p.udp.Close())
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	p.running.Go(p.serveUDP)
	p.running.Go(p.serveTCP)
	return p, nil
}

// UDPAddr and TCPAddr are where it listens.
func (p *Proxy) UDPAddr() string { return p.udp.LocalAddr().String() }

// TCPAddr is where it listens.
func (p *Proxy) TCPAddr() string { return p.tcp.Addr().String() }

// Close cuts everything and waits until nothing of the proxy runs.
func (p *Proxy) Close() error {
	p.mu.Lock()
	p.closed = true
	links := make([]*Link, 0, len(p.links))
	for _, l := range p.links {
		links = append(links, l)
	}
	p.mu.Unlock()
	err := errors.Join(p.udp.Close(), p.tcp.Close())
	for _, l := range links {
		l.close()
	}
	p.running.Wait()
	return err
}

// Link returns the link of the node with this address; it can be impaired before the node's first packet.
func (p *Proxy) Link(node string) *Link { return p.link(netip.MustParseAddr(node)) }

func (p *Proxy) link(node netip.Addr) *Link {
	node = node.Unmap()
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.links[node]
	if l == nil {
		l = &Link{p: p, closed: p.closed, flows: map[netip.AddrPort]*flow{}, conns: map[net.Conn]struct{}{}}
		l.up.fate, l.down.fate = newFate(p.cfg.Seed, node.String(), 0), newFate(p.cfg.Seed, node.String(), 1)
		l.changed = sync.NewCond(&l.mu)
		p.links[node] = l
	}
	return l
}

// Stats count the UDP packets of one direction.
type Stats struct{ Came, Lost, Doubled int }

// way is one direction of a link.
type way struct {
	conditions Conditions
	fate       *fate
	stats      Stats
}

// Link is the path between one node and the hub.
type Link struct {
	p *Proxy

	mu       sync.Mutex
	changed  *sync.Cond
	up, down way
	closed   bool
	flows    map[netip.AddrPort]*flow
	conns    map[net.Conn]struct{}
	dials    []time.Time
	connects []time.Time
}

// Set changes both directions: up is to the hub.
func (l *Link) Set(up, down Conditions) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.up.conditions, l.down.conditions = up, down
	l.changed.Broadcast()
}

// Stats are the packets so far, to the hub and from it.
func (l *Link) Stats() (up, down Stats) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.up.stats, l.down.stats
}

// Dials are the times at which the node began to send from a port that it had not used: each dial of a session does.
func (l *Link) Dials() []time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.dials)
}

// Connects are the times at which the node opened TCP connections.
func (l *Link) Connects() []time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.connects)
}

// next draws the fate of a packet.
func (l *Link) next(w *way) []time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	arrivals := w.fate.next(w.conditions)
	w.stats.Came++
	switch len(arrivals) {
	case 0:
		w.stats.Lost++
	case maxCopies:
		w.stats.Doubled++
	}
	return arrivals
}

func (l *Link) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for _, f := range l.flows {
		f.close()
	}
	for c := range l.conns {
		_ = c.Close()
	}
	l.changed.Broadcast()
}
