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
	// placesPerCore is how many callers may be on their way in for each core, placesMost how many at all. Enough that the processors have
	// work while packets are on their way; more would only make each take longer, and those who are served beside them wait.
	placesPerCore = 16
	placesMost    = 512
	// handshakePlace is how long a handshake keeps its place. One that takes longer goes on without: packets of it were lost, or its
	// sender's address is a false one, and such callers are not to keep out the others.
	handshakePlace = time.Second
	// placesBefore is how many there are before anyone accepts: that many connections quic-go keeps, and it refuses those beyond with
	// all the work of their handshake done.
	placesBefore = 32
)

// door is a listener's socket. It has a bounded number of places, from the first packet to Conn.Settle, and has whoever else dials wait
// in line: a fleet that comes back at once costs no more at any moment than a part of it, and no processor idles while somebody
// waits. quic-go would hold a second's worth of first packets and drop the others, of which half hellos remain.
type door struct {
	*net.UDPConn
	batch *ipv4.PacketConn
	now   func() time.Time

	mu     sync.Mutex
	places int
	// inside are those who have a place, with what gives it back when their handshake takes too long.
	inside map[netip.AddrPort]*time.Timer
	line   *line
	// admitted are packets of callers that were let in and wait for room in a batch.
	admitted []packet
	// ending says that quic-go itself has set a deadline; shut that nobody is let in any more.
	ending, shut bool
}

func newDoor(socket *net.UDPConn) *door {
	return &door{UDPConn: socket, batch: ipv4.NewPacketConn(socket), now: time.Now, places: placesBefore, inside: map[netip.AddrPort]*time.Timer{}, line: newLine()}
}

func places() int { return min(placesPerCore*runtime.GOMAXPROCS(0), placesMost) }

// open makes all places available and returns how many there are.
func (d *door) open() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.places = places()
	d.call()
	return d.places
}

// close lets nobody in any more and forgets who waits.
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

// letIn fills messages with packets of callers for whom there are places.
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
	c := d.line.next(d.now())
	if c == nil {
		return false
	}
	d.inside[c.addr] = time.AfterFunc(handshakePlace, func() { d.leave(c.addr) })
	d.admitted = c.packets
	return true
}

// sort keeps what is to wait and moves the rest to the front. The messages' buffers stay where they are: quic-go counts on it.
func (d *door) sort(messages []ipv4.Message) (n int) {
	for i := range messages {
		m := &messages[i]
		if to, is := firstFlight(m.Buffers[0][:m.N]); is && d.waits(m, to) {
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

// waits puts a first packet into the line, unless its sender is inside already.
func (d *door) waits(m *ipv4.Message, to []byte) bool {
	addr, ok := addrPort(m.Addr)
	if !ok {
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.inside[addr] != nil {
		return false
	}
	if !d.shut {
		d.line.arrive(addr, to, packet{m.Buffers[0][:m.N], m.OOB[:m.NN], m.Addr}, d.now())
	}
	return true
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
func (d *door) leave(addr netip.AddrPort) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if late := d.inside[addr]; late != nil {
		late.Stop()
		delete(d.inside, addr)
		d.call()
	}
}

// authenticated says that the caller's handshake is done: the place is kept until Settle, or the connection's end.
func (d *door) authenticated(at net.Addr) {
	addr, _ := addrPort(at)
	d.mu.Lock()
	defer d.mu.Unlock()
	if late := d.inside[addr]; late != nil {
		late.Stop()
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

// place is the context's key of what gives back a caller's place.
type place struct{}

// begin ties a connection to the place that its caller was let in to: it is given back by Settle, or with the connection's end.
func (d *door) begin(ctx context.Context, info *quic.ClientInfo) (context.Context, error) {
	addr, ok := addrPort(info.RemoteAddr)
	if !ok {
		return ctx, nil
	}
	leave := func() { d.leave(addr) }
	stop := context.AfterFunc(ctx, leave)
	return context.WithValue(ctx, place{}, func() { stop(); leave() }), nil
}
