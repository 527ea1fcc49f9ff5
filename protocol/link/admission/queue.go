package admission

import (
	"net"
	"net/netip"
	"slices"
	"time"
)

const (
	// maxPendingDials bounds the accept queue, maxSourceDials the dials of one source in it. maxDialPackets bounds what is
	// kept of a dial: a first flight with a post-quantum key exchange has two packets and may be sent twice. Together they
	// are at most 20 MB. A client whose dial finds the queue full sends its first packets again.
	maxPendingDials = 4096
	maxSourceDials  = 1024
	maxDialPackets  = 4
	// pendingTimeout is how long a first flight may wait. The client takes the wait for the round-trip time: answered
	// after seconds, it would wait as long for each lost packet. It repeats its flight after 0.3, 0.9, 2.1 and 4.5 s, and
	// then dials again, so a large group always has some that have just sent theirs.
	pendingTimeout = 250 * time.Millisecond
	// sourceBitsIPv4 and sourceBitsIPv6 are the prefixes that share the slots of a listener fairly.
	sourceBitsIPv4, sourceBitsIPv6 = 24, 64
)

// packet is a datagram as it was read.
type packet struct {
	data, oob []byte
	from      net.Addr
}

// pendingDial is a dial with a token and without a slot.
type pendingDial struct {
	addr netip.AddrPort
	// destID is the connection id that the client has chosen for this try.
	destID string
	// at is when its newest packet arrived.
	at      time.Time
	packets []packet
}

func (d *pendingDial) isStale(now time.Time) bool { return now.Sub(d.at) > pendingTimeout }

// source is one address prefix with its dials, in the order of their arrival.
type source struct {
	prefix  netip.Prefix
	pending []*pendingDial
}

func sourceOf(addr netip.Addr) netip.Prefix {
	bits := sourceBitsIPv6
	if addr.Is4() {
		bits = sourceBitsIPv4
	}
	p, _ := addr.Prefix(bits) // fails for bits that the address does not have
	return p
}

// acceptQueue holds the dials that wait for a slot. It serves the sources in turn, so that one with many dials delays
// only its own. A dial that its client has given up leaves the queue.
type acceptQueue struct {
	dials     map[netip.AddrPort]*pendingDial
	sources   map[netip.Prefix]*source
	order     []*source
	cleanedAt time.Time
}

func newAcceptQueue() *acceptQueue {
	return &acceptQueue{dials: map[netip.AddrPort]*pendingDial{}, sources: map[netip.Prefix]*source{}}
}

// add queues a packet of a first flight. It copies what it keeps.
func (q *acceptQueue) add(addr netip.AddrPort, destID []byte, p packet, now time.Time) {
	d := q.dials[addr]
	if d == nil {
		if d = q.newDial(addr, now); d == nil {
			return
		}
	}
	if d.destID != string(destID) || d.isStale(now) {
		// Another flight keeps the position of the first.
		d.destID, d.packets = string(destID), nil
	}
	d.at = now
	if len(d.packets) < maxDialPackets {
		d.packets = append(d.packets, packet{append([]byte(nil), p.data...), append([]byte(nil), p.oob...), p.from})
	}
}

// newDial returns nil when the queue is full, or full for the source.
func (q *acceptQueue) newDial(addr netip.AddrPort, now time.Time) *pendingDial {
	prefix := sourceOf(addr.Addr())
	if q.isFullFor(prefix) {
		q.dropStale(now)
		if q.isFullFor(prefix) {
			return nil
		}
	}
	s := q.sources[prefix]
	if s == nil {
		s = &source{prefix: prefix}
		q.sources[prefix] = s
		q.order = append(q.order, s)
	}
	d := &pendingDial{addr: addr}
	s.pending = append(s.pending, d)
	q.dials[addr] = d
	return d
}

func (q *acceptQueue) isFullFor(prefix netip.Prefix) bool {
	s := q.sources[prefix]
	return len(q.dials) >= maxPendingDials || s != nil && len(s.pending) >= maxSourceDials
}

// dropStale drops all stale dials, at most once in pendingTimeout: in between few can have become stale.
func (q *acceptQueue) dropStale(now time.Time) {
	if now.Sub(q.cleanedAt) < pendingTimeout {
		return
	}
	q.cleanedAt = now
	q.order = slices.DeleteFunc(q.order, func(s *source) bool {
		s.pending = slices.DeleteFunc(s.pending, func(d *pendingDial) bool {
			if d.isStale(now) {
				delete(q.dials, d.addr)
			}
			return d.isStale(now)
		})
		if len(s.pending) == 0 {
			delete(q.sources, s.prefix)
		}
		return len(s.pending) == 0
	})
}

// next removes and returns the first dial of the next source that hasSlot; nil when there is none.
func (q *acceptQueue) next(now time.Time, hasSlot func(netip.Prefix) bool) *pendingDial {
	for range len(q.order) {
		s := q.order[0]
		q.order[0] = nil
		q.order = q.order[1:]
		var d *pendingDial
		for d == nil && len(s.pending) > 0 && (s.pending[0].isStale(now) || hasSlot(s.prefix)) {
			first := s.pending[0]
			s.pending[0] = nil
			s.pending = s.pending[1:]
			delete(q.dials, first.addr)
			if !first.isStale(now) {
				d = first
			}
		}
		if len(s.pending) > 0 {
			q.order = append(q.order, s)
		} else {
			delete(q.sources, s.prefix)
		}
		if d != nil {
			return d
		}
	}
	if len(q.order) == 0 {
		q.order = nil // frees what a large group has used
	}
	return nil
}

func (q *acceptQueue) isEmpty() bool { return len(q.dials) == 0 }
