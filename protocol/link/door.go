package link

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
)

const (
	// placesPerCore is how many callers may be on their way in for each core, placesMost how many at all. Enough that the
	// processors have work while packets are on their way; more would only make each take longer, and requests that are
	// served beside them wait.
	placesPerCore = 16
	placesMost    = 512
	// placesBefore is how many there are before Accept is called: quic-go keeps that many connections, and it refuses
	// those beyond with all the work of their handshake done.
	placesBefore = 32
	// unvalidatedShare is the part of the places that callers may take who have not shown that they receive at their
	// address: 1 of 4. The others get a Retry packet (RFC 9000, section 8.1.2), which costs no place and no memory.
	unvalidatedShare = 4
	// sourceShare keeps 1 of 4 places free for other sources than the one that has most.
	sourceShare = 4
	// handshakePlace is how long a handshake keeps its place. One that takes longer goes on without: packets of it were
	// lost, or its caller is not a node, and such callers must not keep out the others.
	handshakePlace = time.Second
)

// door is a listener's socket. It has a bounded number of places, from the first packet to Conn.Settle. A caller that
// finds none proves its address first and then waits in line: a fleet that comes back at once costs no more at any
// moment than a part of it, no processor idles while a caller waits, and packets with forged addresses take few places
// and none of the line. quic-go would hold a second's worth of first packets and drop the others, of which half hellos
// remain.
type door struct {
	*net.UDPConn
	batch *ipv4.PacketConn
	now   func() time.Time

	mu     sync.Mutex
	places int
	// inside are the callers that have a place, held is how many places each source has, unvalidated how many have no
	// valid token.
	inside      map[netip.AddrPort]*place
	held        map[netip.Prefix]int
	unvalidated int
	line        *line
	// admitted are packets of callers that were let in and wait for room in a batch.
	admitted []packet
	// ending: quic-go itself has set a deadline; shut: no caller is let in any more.
	ending, shut bool
}

// place is a caller on its way in.
type place struct {
	// late gives the place back when the handshake takes too long.
	late *time.Timer
	// hasToken: the caller has shown a token. quic-go says whether that is a valid one.
	hasToken bool
	// begun: a connection has been made for the place.
	begun bool
}

func newDoor(socket *net.UDPConn) *door {
	return &door{
		UDPConn: socket, batch: ipv4.NewPacketConn(socket), now: time.Now, places: placesBefore,
		inside: map[netip.AddrPort]*place{}, held: map[netip.Prefix]int{}, line: newLine(),
	}
}

func places() int { return min(placesPerCore*runtime.GOMAXPROCS(0), placesMost) }

// sourcePlaces is how many of the places one source may have.
func sourcePlaces(places int) int { return places - places/sourceShare }

// open makes all places available and returns how many there are.
func (d *door) open() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.places = places()
	d.call()
	return d.places
}

// close lets no caller in any more and forgets those that wait.
func (d *door) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.shut, d.line, d.admitted = true, newLine(), nil
}

// ReadBatch reads what came for connections, and the first packets of those whose turn it is. quic-go calls it.
func (d *door) ReadBatch(messages []ipv4.Message, flags int) (int, error) {
	for {
		if n := d.letIn(messages); n > 0 {
			return n, nil
		}
		n, err := d.batch.ReadBatch(messages, flags)
		if errors.Is(err, os.ErrDeadlineExceeded) && d.resume() {
			continue
		}
		if err != nil {
			return n, err
		}
		if n = d.sort(messages[:n]); n > 0 {
			return n, nil
		}
	}
}

// letIn fills messages with packets of callers for which there are places.
func (d *door) letIn(messages []ipv4.Message) (n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for n < len(messages) {
		if len(d.admitted) == 0 && !d.admit() {
			break
		}
		p := d.admitted[0]
		d.admitted = d.admitted[1:]
		m := &messages[n]
		m.N, m.NN, m.Addr, m.Flags = copy(m.Buffers[0], p.data), copy(m.OOB, p.oob), p.from, 0
		n++
	}
	return n
}

// admit takes the next caller in; false when there is none, or no place. mu is held.
func (d *door) admit() bool {
	if len(d.inside) >= d.places {
		return false
	}
	c := d.line.next(d.now(), d.hasPlaceFor)
	if c == nil {
		return false
	}
	d.enter(c.addr, true)
	d.admitted = c.packets
	return true
}

// hasPlaceFor reports whether a caller of the source may have a place. mu is held.
func (d *door) hasPlaceFor(source netip.Prefix) bool {
	return len(d.inside) < d.places && d.held[source] < sourcePlaces(d.places)
}

// enter gives the caller a place. mu is held.
func (d *door) enter(addr netip.AddrPort, hasToken bool) {
	p := &place{hasToken: hasToken}
	p.late = time.AfterFunc(handshakePlace, func() { d.leave(addr, p) })
	d.inside[addr] = p
	d.held[sourceOf(addr.Addr())]++
	if !hasToken {
		d.unvalidated++
	}
}

// sort keeps what is to wait and moves the rest to the front. The messages' buffers stay where they are: quic-go counts
// on it.
func (d *door) sort(messages []ipv4.Message) (n int) {
	for i := range messages {
		m := &messages[i]
		if f, is := firstFlight(m.Buffers[0][:m.N]); is && d.waits(m, f) {
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

// waits puts a first packet into the line, unless its sender is inside already, or must show first that it receives at
// its address.
func (d *door) waits(m *ipv4.Message, f flight) bool {
	addr, ok := addrPort(m.Addr)
	if !ok {
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.inside[addr] != nil:
		return false
	case d.shut:
		return true // not answered: the caller waits for a successor
	case f.hasToken:
		d.line.arrive(addr, f.to, packet{m.Buffers[0][:m.N], m.OOB[:m.NN], m.Addr}, d.now())
		return true
	}
	if d.line.isEmpty() && d.unvalidated < d.places/unvalidatedShare && d.hasPlaceFor(sourceOf(addr.Addr())) {
		d.enter(addr, false)
	}
	return false // without a place it gets a Retry: see mustValidate
}

// mustValidate tells quic-go whether a caller without a valid token gets a Retry packet instead of a connection.
func (d *door) mustValidate(from net.Addr) bool {
	addr, ok := addrPort(from)
	if !ok {
		return false
	}
	d.mu.Lock()
	p := d.inside[addr]
	known, forged := p != nil && !p.hasToken, p != nil && p.hasToken && !p.begun
	d.mu.Unlock()
	if forged {
		d.leave(addr, p)
	}
	return !known
}

func addrPort(a net.Addr) (netip.AddrPort, bool) {
	udp, ok := a.(*net.UDPAddr)
	if !ok {
		return netip.AddrPort{}, false
	}
	at := udp.AddrPort()
	return netip.AddrPortFrom(at.Addr().Unmap(), at.Port()), true
}

// leave gives a place back.
func (d *door) leave(addr netip.AddrPort, p *place) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.inside[addr] != p {
		return
	}
	p.late.Stop()
	delete(d.inside, addr)
	source := sourceOf(addr.Addr())
	if d.held[source]--; d.held[source] == 0 {
		delete(d.held, source)
	}
	if !p.hasToken {
		d.unvalidated--
	}
	d.call()
}

// authenticated says that the caller's handshake is done: the place is kept until Settle, or the connection's end.
func (d *door) authenticated(at net.Addr) {
	addr, _ := addrPort(at)
	d.mu.Lock()
	defer d.mu.Unlock()
	if p := d.inside[addr]; p != nil {
		p.late.Stop()
	}
}

// call has the reader look at the line. mu is held.
func (d *door) call() {
	if !d.ending && !d.line.isEmpty() {
		_ = d.UDPConn.SetReadDeadline(time.Unix(1, 0))
	}
}

// resume makes the socket readable again after call; false when it is quic-go that stops reading.
func (d *door) resume() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return !d.ending && d.UDPConn.SetReadDeadline(time.Time{}) == nil
}

// SetReadDeadline is for quic-go, which stops reading by it.
func (d *door) SetReadDeadline(t time.Time) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ending = !t.IsZero()
	return d.UDPConn.SetReadDeadline(t)
}

// placeKey is the context's key of what gives back a caller's place.
type placeKey struct{}

// begin ties a connection to the place that its caller was let in to: it is given back by Settle, or with the
// connection's end. A place is for one connection.
func (d *door) begin(ctx context.Context, info *quic.ClientInfo) (context.Context, error) {
	addr, ok := addrPort(info.RemoteAddr)
	if !ok {
		return ctx, nil
	}
	d.mu.Lock()
	p := d.inside[addr]
	if p == nil || p.begun {
		d.mu.Unlock()
		if p != nil {
			return nil, errors.New("link: the caller has another connection on its way in")
		}
		return ctx, nil // the place was given back a moment ago
	}
	p.begun = true
	d.mu.Unlock()
	leave := func() { d.leave(addr, p) }
	stop := context.AfterFunc(ctx, leave)
	return context.WithValue(ctx, placeKey{}, func() { stop(); leave() }), nil
}
