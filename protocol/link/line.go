package link

import (
	"encoding/binary"
	"net"
	"net/netip"
	"time"
)

const (
	// lineCallers is how many callers may wait in line, sourceCallers how many of one source, callerPackets what is kept
	// of each: a first flight with a post-quantum key exchange has two packets, and may be sent twice. Together they are
	// at most 20 MB. A caller that finds no room repeats its flight by itself.
	lineCallers   = 4096
	sourceCallers = 1024
	callerPackets = 4
	// callerPatience is how long a first flight may wait. A caller takes the time until it is answered for the time that
	// packets travel: answered after seconds, it would wait as long again for each packet that is lost. It repeats its
	// flight after 0.3, 0.9, 2.1 and 4.5 s, and then dials again; of a crowd there are always some who have just called.
	callerPatience = 250 * time.Millisecond
	// firstFlightBytes is the least that a client may begin with (RFC 9000, section 14.1).
	firstFlightBytes = 1200
	// sourceBitsIPv4 and sourceBitsIPv6 are the prefixes that share the places of a listener fairly.
	sourceBitsIPv4, sourceBitsIPv6 = 24, 64
)

// packet is a datagram as it was read.
type packet struct {
	data, oob []byte
	from      net.Addr
}

// caller dials from one address, has shown a token for it, and has no place yet.
type caller struct {
	addr netip.AddrPort
	// dial is the connection id that the caller has chosen for this try.
	dial     string
	calledAt time.Time
	packets  []packet
}

func (c *caller) isStale(now time.Time) bool { return now.Sub(c.calledAt) > callerPatience }

// source is one address prefix with its callers, in the order of their arrival.
type source struct {
	prefix  netip.Prefix
	waiting []*caller
}

func sourceOf(addr netip.Addr) netip.Prefix {
	bits := sourceBitsIPv6
	if addr.Is4() {
		bits = sourceBitsIPv4
	}
	p, _ := addr.Prefix(bits) // fails for bits that the address does not have
	return p
}

// line holds the callers that wait for a place. Sources take turns, so that one with many callers delays its own only.
// Waiting costs its memory and nothing else, and ends by itself: no caller in it has given up.
type line struct {
	callers map[netip.AddrPort]*caller
	sources map[netip.Prefix]*source
	turns   []*source
	sweptAt time.Time
}

func newLine() *line {
	return &line{callers: map[netip.AddrPort]*caller{}, sources: map[netip.Prefix]*source{}}
}

// arrive takes a packet of a first flight. p is copied when it is kept.
func (l *line) arrive(addr netip.AddrPort, dial []byte, p packet, now time.Time) {
	c := l.callers[addr]
	if c == nil {
		if c = l.add(addr, now); c == nil {
			return
		}
	}
	if c.dial != string(dial) || c.isStale(now) {
		// Another flight; the place in line is kept.
		c.dial, c.packets = string(dial), nil
	}
	c.calledAt = now
	if len(c.packets) < callerPackets {
		c.packets = append(c.packets, packet{append([]byte(nil), p.data...), append([]byte(nil), p.oob...), p.from})
	}
}

// add makes a caller, nil when there is no room for it.
func (l *line) add(addr netip.AddrPort, now time.Time) *caller {
	prefix := sourceOf(addr.Addr())
	s := l.sources[prefix]
	if len(l.callers) >= lineCallers || s != nil && len(s.waiting) >= sourceCallers {
		l.sweep(now)
		s = l.sources[prefix]
	}
	if len(l.callers) >= lineCallers || s != nil && len(s.waiting) >= sourceCallers {
		return nil
	}
	if s == nil {
		s = &source{prefix: prefix}
		l.sources[prefix] = s
		l.turns = append(l.turns, s)
	}
	c := &caller{addr: addr}
	s.waiting = append(s.waiting, c)
	l.callers[addr] = c
	return c
}

// sweep forgets all stale callers, at most once in callerPatience: in between few can have become stale.
func (l *line) sweep(now time.Time) {
	if now.Sub(l.sweptAt) < callerPatience {
		return
	}
	l.sweptAt = now
	turns := l.turns[:0]
	for _, s := range l.turns {
		kept := s.waiting[:0]
		for _, c := range s.waiting {
			if c.isStale(now) {
				delete(l.callers, c.addr)
				continue
			}
			kept = append(kept, c)
		}
		clear(s.waiting[len(kept):])
		if s.waiting = kept; len(kept) == 0 {
			delete(l.sources, s.prefix)
			continue
		}
		turns = append(turns, s)
	}
	clear(l.turns[len(turns):])
	l.turns = turns
}

// next takes the first caller of the next source that may have a place out of the line; nil when there is none.
func (l *line) next(now time.Time, mayEnter func(netip.Prefix) bool) *caller {
	for range len(l.turns) {
		s := l.turns[0]
		l.turns[0] = nil
		l.turns = l.turns[1:]
		var c *caller
		for c == nil && len(s.waiting) > 0 && (s.waiting[0].isStale(now) || mayEnter(s.prefix)) {
			first := s.waiting[0]
			s.waiting[0] = nil
			s.waiting = s.waiting[1:]
			delete(l.callers, first.addr)
			if !first.isStale(now) {
				c = first
			}
		}
		if len(s.waiting) > 0 {
			l.turns = append(l.turns, s)
		} else {
			delete(l.sources, s.prefix)
		}
		if c != nil {
			return c
		}
	}
	if len(l.turns) == 0 {
		l.turns = nil // a crowd that has gone leaves nothing behind
	}
	return nil
}

func (l *line) isEmpty() bool { return len(l.callers) == 0 }

// The versions of QUIC that are spoken here, and what tells a first packet in each (RFC 9000, section 17.2.2, and RFC
// 9369, section 3.2).
const (
	quicVersion1, initialVersion1 = 1, 0
	quicVersion2, initialVersion2 = 0x6b3343cf, 1
	longHeader                    = 0x80
	maxConnectionIDBytes          = 20
)

// flight is what the header of a first packet says.
type flight struct {
	// to is the connection id that the packet is sent to.
	to []byte
	// hasToken: the packet carries a token, which may prove that its sender receives at the address.
	hasToken bool
}

// firstFlight reports whether the datagram begins a connection or belongs to one that has just begun.
func firstFlight(b []byte) (f flight, is bool) {
	if len(b) < firstFlightBytes || b[0]&longHeader == 0 {
		return flight{}, false
	}
	version, kind := binary.BigEndian.Uint32(b[1:]), b[0]>>4&3
	first := version == quicVersion1 && kind == initialVersion1 || version == quicVersion2 && kind == initialVersion2
	to := int(b[5])
	if !first || to > maxConnectionIDBytes {
		return flight{}, false
	}
	from := int(b[6+to])
	if from > maxConnectionIDBytes {
		return flight{}, false
	}
	return flight{to: b[6 : 6+to], hasToken: b[7+to+from] != 0}, true
}
