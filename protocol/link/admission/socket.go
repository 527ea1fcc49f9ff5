// Package admission bounds how many QUIC handshakes a listener has at a time. It wraps the UDP socket that quic-go
// reads, and holds back the packets that open connections. It relies on how quic-go reads a socket and on the order of
// its callbacks; TestConformance* fail when a release of quic-go differs. It knows no TLS and no messages.
package admission

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"time"

	"github.com/quic-go/quic-go"
	"golang.org/x/net/ipv4"

	"github.com/gpuaas/gpuaas/protocol/link/gro"
)

const (
	// slotsPerCore is how many connections may be in their handshake for each core, maxSlots how many at all. They keep
	// the processors busy while packets are on their way; more would make each handshake take longer and delay the
	// requests of connected nodes.
	slotsPerCore = 16
	maxSlots     = 512
	// slotsBeforeStart is the number of slots until Start: quic-go queues that many connections, and refuses more after it
	// has done all the work of their handshake.
	slotsBeforeStart = 32
	// unvalidatedShare is the part of the slots that dials without a validated address may take: 1 of 4. The others get a
	// Retry packet (RFC 9000, section 8.1.2), which takes no slot and no memory.
	unvalidatedShare = 4
	// sourceShare keeps 1 of 4 slots free for other sources than the one that has most.
	sourceShare = 4
	// handshakeTimeout is how long a handshake keeps its slot. A longer one continues without: its packets were lost, or
	// it is no node's, and such dials must not keep out the others.
	handshakeTimeout = time.Second
)

// Socket is a listener's UDP socket with a bounded number of slots. A dial has a slot from its first packet until
// Release. A dial that finds none validates its address first and then waits in the accept queue. So a fleet that
// reconnects at once costs no more at a time than a part of it, no processor idles while a dial waits, and packets with
// forged addresses take few slots and no queue. quic-go alone would queue a second of first packets and drop the rest.
type Socket struct {
	*gro.Conn
	now func() time.Time

	mu    sync.Mutex
	slots int
	// taken are the slots by the address of their dial, perSource counts those of each source, unvalidated those without
	// a token.
	taken       map[netip.AddrPort]*slot
	perSource   map[netip.Prefix]int
	unvalidated int
	queue       *acceptQueue
	// ready are packets of admitted dials that did not fit into a batch yet.
	ready []packet
	// readEnded: quic-go has set a deadline to stop reading. stopped: no dial is admitted any more.
	readEnded, stopped bool
}

// slot is the admission of one dial.
type slot struct {
	// timeout releases the slot when the handshake takes too long.
	timeout *time.Timer
	// hasToken: the dial has shown a token. quic-go decides whether it is valid.
	hasToken bool
	// connected: quic-go has made a connection for the slot.
	connected bool
}

// New wraps a socket, which the caller closes.
func New(socket *net.UDPConn) *Socket {
	return &Socket{
		Conn: gro.New(socket), now: time.Now, slots: slotsBeforeStart,
		taken: map[netip.AddrPort]*slot{}, perSource: map[netip.Prefix]int{}, queue: newAcceptQueue(),
	}
}

// Attach makes the transport read and ask this socket. Call it before the transport listens.
func (s *Socket) Attach(t *quic.Transport) {
	t.Conn, t.ConnContext, t.VerifySourceAddress = s, s.connContext, s.verifySourceAddress
}

// Slots is how many slots a listener has on this machine.
func Slots() int { return min(slotsPerCore*runtime.GOMAXPROCS(0), maxSlots) }

// SourceSlots is how many of the slots one source may have.
func SourceSlots(slots int) int { return slots - slots/sourceShare }

// Start makes all slots available, once the listener accepts connections, and returns their number.
func (s *Socket) Start() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.slots = Slots()
	s.wakeReader()
	return s.slots
}

// Stop admits no dial any more and drops those that wait; they are not answered.
func (s *Socket) Stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped, s.queue, s.ready = true, newAcceptQueue(), nil
}

// ReadBatch reads packets of connections and of admitted dials. quic-go calls it.
func (s *Socket) ReadBatch(messages []ipv4.Message, flags int) (int, error) {
	for {
		if n := s.deliver(messages); n > 0 {
			return n, nil
		}
		n, err := s.Conn.ReadBatch(messages, flags)
		if errors.Is(err, os.ErrDeadlineExceeded) && s.resume() {
			continue
		}
		if err != nil {
			return n, err
		}
		if n = s.filter(messages[:n]); n > 0 {
			return n, nil
		}
	}
}

// deliver fills messages with packets of dials for which there are slots.
func (s *Socket) deliver(messages []ipv4.Message) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for n < len(messages) {
		if len(s.ready) == 0 && !s.admitNext() {
			break
		}
		p := s.ready[0]
		s.ready = s.ready[1:]
		m := &messages[n]
		m.N, m.NN, m.Addr, m.Flags = copy(m.Buffers[0], p.data), copy(m.OOB, p.oob), p.from, 0
		n++
	}
	return n
}

// admitNext admits the next dial of the queue; false when there is none, or no slot. mu is held.
func (s *Socket) admitNext() bool {
	if len(s.taken) >= s.slots {
		return false
	}
	d := s.queue.next(s.now(), s.hasSlotFor)
	if d == nil {
		return false
	}
	s.admit(d.addr, true)
	s.ready = d.packets
	return true
}

// hasSlotFor reports whether a dial of the source may have a slot. mu is held.
func (s *Socket) hasSlotFor(source netip.Prefix) bool {
	return len(s.taken) < s.slots && s.perSource[source] < SourceSlots(s.slots)
}

// admit gives the dial a slot. mu is held.
func (s *Socket) admit(addr netip.AddrPort, hasToken bool) {
	p := &slot{hasToken: hasToken}
	p.timeout = time.AfterFunc(handshakeTimeout, func() { s.release(addr, p) })
	s.taken[addr] = p
	s.perSource[sourceOf(addr.Addr())]++
	if !hasToken {
		s.unvalidated++
	}
}

// filter takes out the packets that must wait and moves the others to the front. It copies their bytes, because quic-go
// frees its buffers by their position in the batch.
func (s *Socket) filter(messages []ipv4.Message) (n int) {
	for i := range messages {
		m := &messages[i]
		if p, is := parseInitial(m.Buffers[0][:m.N]); is && s.mustWait(m, p) {
			continue
		}
		if n < i {
			k := &messages[n]
			k.N, k.NN, k.Addr, k.Flags = copy(k.Buffers[0], m.Buffers[0][:m.N]), copy(k.OOB, m.OOB[:m.NN]), m.Addr, m.Flags
		}
		n++
	}
	return n
}

// mustWait queues an Initial packet with a token. It leaves to quic-go the packets of admitted dials, and those without
// a token: they take a slot where there is one, and get a Retry packet otherwise (verifySourceAddress).
func (s *Socket) mustWait(m *ipv4.Message, p initial) bool {
	addr, ok := addrPort(m.Addr)
	if !ok {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.taken[addr] != nil:
		return false
	case s.stopped:
		return true // not answered: the dialler waits for the next listener
	case p.hasToken:
		s.queue.add(addr, p.destID, packet{m.Buffers[0][:m.N], m.OOB[:m.NN], m.Addr}, s.now())
		return true
	}
	if s.queue.isEmpty() && s.unvalidated < s.slots/unvalidatedShare && s.hasSlotFor(sourceOf(addr.Addr())) {
		s.admit(addr, false)
	}
	return false
}

// verifySourceAddress tells quic-go whether a dial without a valid token gets a Retry packet instead of a connection.
func (s *Socket) verifySourceAddress(from net.Addr) bool {
	addr, ok := addrPort(from)
	if !ok {
		return false
	}
	s.mu.Lock()
	p := s.taken[addr]
	admitted, forged := p != nil && !p.hasToken, p != nil && p.hasToken && !p.connected
	s.mu.Unlock()
	if forged {
		s.release(addr, p)
	}
	return !admitted
}

func addrPort(a net.Addr) (netip.AddrPort, bool) {
	udp, ok := a.(*net.UDPAddr)
	if !ok {
		return netip.AddrPort{}, false
	}
	at := udp.AddrPort()
	return netip.AddrPortFrom(at.Addr().Unmap(), at.Port()), true
}

// release frees the slot, unless it was freed before.
func (s *Socket) release(addr netip.AddrPort, p *slot) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taken[addr] != p {
		return
	}
	p.timeout.Stop()
	delete(s.taken, addr)
	source := sourceOf(addr.Addr())
	if s.perSource[source]--; s.perSource[source] == 0 {
		delete(s.perSource, source)
	}
	if !p.hasToken {
		s.unvalidated--
	}
	s.wakeReader()
}

// HandshakeDone keeps the dial's slot until Release or the end of its connection, however long that takes.
func (s *Socket) HandshakeDone(from net.Addr) {
	addr, _ := addrPort(from)
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.taken[addr]; p != nil {
		p.timeout.Stop()
	}
}

// wakeReader interrupts ReadBatch, which then admits from the queue. mu is held.
func (s *Socket) wakeReader() {
	if !s.readEnded && !s.queue.isEmpty() {
		_ = s.UDPConn.SetReadDeadline(time.Unix(1, 0))
	}
}

// resume makes the socket readable again after wakeReader; false when quic-go has stopped reading.
func (s *Socket) resume() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.readEnded && s.UDPConn.SetReadDeadline(time.Time{}) == nil
}

// SetReadDeadline is how quic-go stops reading.
func (s *Socket) SetReadDeadline(t time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.readEnded = !t.IsZero()
	return s.UDPConn.SetReadDeadline(t)
}

// releaseKey is the context's key of the function that releases a connection's slot.
type releaseKey struct{}

// connContext ties a new connection to the slot of its dial. A slot is for one connection.
func (s *Socket) connContext(ctx context.Context, info *quic.ClientInfo) (context.Context, error) {
	addr, ok := addrPort(info.RemoteAddr)
	if !ok {
		return ctx, nil
	}
	s.mu.Lock()
	p := s.taken[addr]
	if p == nil || p.connected {
		s.mu.Unlock()
		if p != nil {
			return nil, errors.New("admission: another connection of this address is in its handshake")
		}
		return ctx, nil // the slot has just timed out
	}
	p.connected = true
	s.mu.Unlock()
	release := func() { s.release(addr, p) }
	stop := context.AfterFunc(ctx, release)
	return context.WithValue(ctx, releaseKey{}, func() { stop(); release() }), nil
}

// Release frees the slot of the connection with this context; a connection that ends frees its slot by itself.
func Release(conn context.Context) {
	if release, ok := conn.Value(releaseKey{}).(func()); ok {
		release()
	}
}
