package admission

import "encoding/binary"

// The QUIC versions of quic-go, and what marks an Initial packet in each (RFC 9000, section 17.2.2, and RFC 9369,
// section 3.2).
const (
	quicVersion1, initialVersion1 = 1, 0
	quicVersion2, initialVersion2 = 0x6b3343cf, 1
	longHeader                    = 0x80
	maxConnectionIDBytes          = 20
	// minInitialBytes is the least size of a client's Initial packet (RFC 9000, section 14.1).
	minInitialBytes = 1200
)

// initial is what the header of an Initial packet says.
type initial struct {
	// destID is the connection id that the packet is sent to.
	destID []byte
	// hasToken: the packet carries a token, which may prove that its sender receives at the address.
	hasToken bool
}

// parseInitial reports whether quic-go may open a connection for the datagram. It is also true for later Initial
// packets of a connection.
func parseInitial(b []byte) (p initial, is bool) {
	if len(b) < minInitialBytes || b[0]&longHeader == 0 {
		return initial{}, false
	}
	version, kind := binary.BigEndian.Uint32(b[1:]), b[0]>>4&3
	is = version == quicVersion1 && kind == initialVersion1 || version == quicVersion2 && kind == initialVersion2
	destBytes := int(b[5])
	if !is || destBytes > maxConnectionIDBytes {
		return initial{}, false
	}
	sourceBytes := int(b[6+destBytes])
	if sourceBytes > maxConnectionIDBytes {
		return initial{}, false
	}
	return initial{destID: b[6 : 6+destBytes], hasToken: b[7+destBytes+sourceBytes] != 0}, true
}
