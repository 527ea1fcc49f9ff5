package link

import (
	"encoding/binary"
	"net"
	"net/netip"
	"time"
)

const (
	// lineCallers is how many callers may wait in line, callerPackets what is kept of each: a first flight with a key exchange of our
	// days has two packets, and may be sent twice. Together they are at most 20 MB; whoever finds the line full calls again by itself.
	lineCallers   = 4096
	callerPackets = 4
	// callerPatience is how long a first flight may wait. A caller takes the time until it is answered for the time that packets travel:
	// answered after seconds, it would wait as long again for each packet that is lost. It repeats its flight after 0.3, 0.9, 2.1 and
	// 4.5 s, and then dials again; of a crowd there are always some who have just called.
	callerPatience = 250 * time.Millisecond
	// firstFlightBytes is the least that a client may begin with (RFC 9000, section 14.1).
	firstFlightBytes = 1200
)

// packet is a datagram as it was read.
type packet struct {
	data, oob []byte
	from      net.Addr
}

// caller is who dials from one address and has not been let in yet.
type caller struct {
	addr netip.AddrPort
	// dial is the connection id that the caller has chosen for this try.
	dial    string
	heard   time.Time
	packets []packet
}

func (c *caller) isStale(now time.Time) bool { return now.Sub(c.heard) > callerPatience }

// line is who waits to be let in, in the order in which they were heard first. Waiting costs its memory and nothing else, and ends by
// itself: there is no one in it who has given up.
type line struct {
	callers map[netip.AddrPort]*caller
	order   []*caller
}

func newLine() *line { return &line{callers: map[netip.AddrPort]*caller{}} }

// arrive takes a packet of a first flight. p is copied when it is kept.
func (l *line) arrive(addr netip.AddrPort, dial []byte, p packet, now time.Time) {
	c := l.callers[addr]
	if c == nil {
		if len(l.callers) >= lineCallers {
			l.dropFront(now)
		}
		if len(l.callers) >= lineCallers {
			return
		}
		c = &caller{addr: addr, heard: now}
		l.callers[addr], l.order = c, append(l.order, c)
	}
	if c.dial != string(dial) || c.isStale(now) {
		// Another flight; the place in line is kept.
		c.dial, c.packets = string(dial), nil
	}
	c.heard = now
	if len(c.packets) < callerPackets {
		c.packets = append(c.packets, packet{append([]byte(nil), p.data...), append([]byte(nil), p.oob...), p.from})
	}
}

// dropFront forgets those at the head of the line whose calls are stale.
func (l *line) dropFront(now time.Time) {
	for len(l.order) > 0 && l.order[0].isStale(now) {
		l.pop()
	}
}

func (l *line) pop() *caller {
	c := l.order[0]
	l.order[0] = nil
	l.order = l.order[1:]
	delete(l.callers, c.addr)
	if len(l.order) == 0 {
		l.order = nil // a crowd that has gone leaves nothing behind
	}
	return c
}

// next takes the first who still waits out of the line; nil when there is nobody.
func (l *line) next(now time.Time) *caller {
	l.dropFront(now)
	if len(l.order) == 0 {
		return nil
	}
	return l.pop()
}

func (l *line) isEmpty() bool { return len(l.order) == 0 }

// The versions of QUIC that are spoken here, and what tells a first packet in each (RFC 9000, section 17.2.2, and RFC 9369, section 3.2).
const (
	quicVersion1, initialVersion1 = 1, 0
	quicVersion2, initialVersion2 = 0x6b3343cf, 1
	longHeader                    = 0x80
	maxConnectionIDBytes          = 20
)

// firstFlight reports whether the datagram begins a connection or belongs to one that has just begun, and the id that it is sent to.
func firstFlight(b []byte) (to []byte, is bool) {
	if len(b) < firstFlightBytes || b[0]&longHeader == 0 {
		return nil, false
	}
	version, kind := binary.BigEndian.Uint32(b[1:]), b[0]>>4&3
	first := version == quicVersion1 && kind == initialVersion1 || version == quicVersion2 && kind == initialVersion2
	n := int(b[5])
	if !first || n > maxConnectionIDBytes {
		return nil, false
	}
	return b[6 : 6+n], true
}
