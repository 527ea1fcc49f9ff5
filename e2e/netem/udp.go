package netem

import (
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"
)

// maxPacketBytes is the largest UDP packet.
const maxPacketBytes = 64 << 10

// flow is what one port of a node sends and receives. The hub sees it come from a port of the proxy's, as from a NAT's.
type flow struct {
	link *Link
	node netip.AddrPort

	mu      sync.Mutex
	outside *net.UDPConn
	closed  bool
}

func (p *Proxy) serveUDP() {
	buf := make([]byte, maxPacketBytes)
	for {
		n, from, err := p.udp.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // what a peer's host says of an earlier packet
		}
		l := p.link(from.Addr())
		f := l.flow(from)
		if f == nil {
			continue
		}
		deliver(l.next(&l.up), buf[:n], f.send)
	}
}

// deliver hands a packet over when its time has come; one without delay at once, so that order is kept.
func deliver(arrivals []time.Duration, packet []byte, send func([]byte)) {
	for _, after := range arrivals {
		if after <= 0 {
			send(packet)
			continue
		}
		late := append([]byte(nil), packet...)
		time.AfterFunc(after, func() { send(late) })
	}
}

// flow finds or makes the flow of one port; nil when that cannot be.
func (l *Link) flow(node netip.AddrPort) *flow {
	l.mu.Lock()
	defer l.mu.Unlock()
	if f := l.flows[node]; f != nil || l.closed {
		return f
	}
	f := &flow{link: l, node: node}
	if err := f.open(); err != nil {
		return nil
	}
	l.flows[node] = f
	l.dials = append(l.dials, time.Now())
	return f
}

// open takes a new port towards the hub and gives up the one before.
func (f *flow) open() error {
	var outside *net.UDPConn
	err := Within(f.link.p.cfg.NetNS, func() error {
		hub, err := net.ResolveUDPAddr("udp", f.link.p.cfg.HubUDP)
		if err != nil {
			return err
		}
		outside, err = net.DialUDP("udp", nil, hub)
		return err
	})
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return outside.Close()
	}
	if f.outside != nil {
		_ = f.outside.Close()
	}
	f.outside = outside
	f.link.p.running.Go(func() { f.receive(outside) })
	return nil
}

// send forwards a packet to the hub; errors of an absent hub are ignored, as by a network.
func (f *flow) send(packet []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.closed {
		_, _ = f.outside.Write(packet)
	}
}

// receive passes on what the hub sends to this port.
func (f *flow) receive(outside *net.UDPConn) {
	buf := make([]byte, maxPacketBytes)
	for {
		n, err := outside.Read(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // the port of a hub that is away is unreachable
		}
		deliver(f.link.next(&f.link.down), buf[:n], func(packet []byte) {
			_, _ = f.link.p.udp.WriteToUDPAddrPort(packet, f.node)
		})
	}
}

func (f *flow) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	_ = f.outside.Close()
}

// Rebind gives every flow of the node another port towards the hub, as a NAT does that has forgotten them.
func (l *Link) Rebind() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var failed error
	for _, f := range l.flows {
		failed = errors.Join(failed, f.open())
	}
	return failed
}
