package network

import (
	"encoding/binary"
	"net"
	"net/netip"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// The parts of rules. They use register 1, and 2 where a value has two parts. The kernel gives rules back in these
// expressions, so a rule of the table can be compared with the generated one.

// transportProtocol is a protocol that ports are published for.
type transportProtocol struct {
	name   string
	number byte
}

//nolint:gochecknoglobals // constants that Go has no literal for
var (
	tcp = transportProtocol{"tcp", unix.IPPROTO_TCP}
	udp = transportProtocol{"udp", unix.IPPROTO_UDP}
)

// Offsets in the headers of IPv4, TCP and UDP.
const (
	sourceOffset      = 12
	destinationOffset = 16
	portOffset        = 2
)

func join(parts ...rule) rule { return slices.Concat(parts...) }

func accept() rule { return rule{&expr.Verdict{Kind: expr.VerdictAccept}} }
func drop() rule   { return rule{&expr.Verdict{Kind: expr.VerdictDrop}} }

func jump(chain string) rule { return rule{&expr.Verdict{Kind: expr.VerdictJump, Chain: chain}} }

// linkName is a link's name as the kernel compares it.
func linkName(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

func inputLink(op expr.CmpOp, name string) rule {
	return rule{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
		&expr.Cmp{Op: op, Register: 1, Data: linkName(name)},
	}
}

func outputLink(op expr.CmpOp, name string) rule {
	return rule{
		&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1},
		&expr.Cmp{Op: op, Register: 1, Data: linkName(name)},
	}
}

func ipFamily(family byte) rule {
	return rule{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{family}},
	}
}

// loadAddress puts an address of an IPv4 packet into register 1; other packets do not match.
func loadAddress(offset uint32) rule {
	return append(ipFamily(unix.NFPROTO_IPV4), &expr.Payload{
		DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4,
	})
}

func inNetwork(offset uint32, op expr.CmpOp, network netip.Prefix) rule {
	r := loadAddress(offset)
	if network.Bits() < 32 {
		r = append(r, &expr.Bitwise{
			SourceRegister: 1, DestRegister: 1, Len: 4,
			Mask: net.CIDRMask(network.Bits(), 32), Xor: make([]byte, 4),
		})
	}
	return append(r, &expr.Cmp{Op: op, Register: 1, Data: network.Masked().Addr().AsSlice()})
}

func source(op expr.CmpOp, network netip.Prefix) rule { return inNetwork(sourceOffset, op, network) }

func destination(network netip.Prefix) rule {
	return inNetwork(destinationOffset, expr.CmpOpEq, network)
}

// destinationIn matches IPv4 packets to an address in the set.
func destinationIn(set string) rule {
	return append(loadAddress(destinationOffset), &expr.Lookup{SourceRegister: 1, SetName: set})
}

func transport(p transportProtocol) rule {
	return rule{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{p.number}},
	}
}

func loadPort(p transportProtocol) rule {
	return append(transport(p), &expr.Payload{
		DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: portOffset, Len: 2,
	})
}

func portBytes(port uint16) []byte { return binary.BigEndian.AppendUint16(nil, port) }

func destinationPorts(p transportProtocol, ports portRange) rule {
	if ports.first == ports.last {
		return append(loadPort(p), &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: portBytes(ports.first)})
	}
	return append(loadPort(p),
		&expr.Cmp{Op: expr.CmpOpGte, Register: 1, Data: portBytes(ports.first)},
		&expr.Cmp{Op: expr.CmpOpLte, Register: 1, Data: portBytes(ports.last)})
}

// inState matches packets of connections in one of the states.
func inState(states uint32) rule {
	return rule{
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Bitwise{
			SourceRegister: 1, DestRegister: 1, Len: 4,
			Mask: binary.NativeEndian.AppendUint32(nil, states), Xor: make([]byte, 4),
		},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
	}
}

func newFlow() rule { return inState(expr.CtStateBitNEW) }

// answers matches packets in reply direction of a connection.
func answers() rule {
	const reply = 1 // IP_CT_DIR_REPLY
	return append(inState(expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED),
		&expr.Ct{Key: expr.CtKeyDIRECTION, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{reply}})
}

// countBySource applies a limit to the packets of each source address.
func countBySource(set string, limit expr.Any) rule {
	return append(loadAddress(sourceOffset), &expr.Dynset{
		SrcRegKey: 1, SetName: set, Operation: unix.NFT_DYNSET_OP_ADD, Exprs: []expr.Any{limit},
	})
}

// publishedNet is the host address that ports are published on.
func publishedNet() netip.Prefix {
	addr := netip.MustParseAddr(publishedOn)
	return netip.PrefixFrom(addr, addr.BitLen())
}

// publishedPort translates a published port to the member's address and port, which its map holds.
func publishedPort(p transportProtocol) rule {
	// The value begins in register 1; its port is in the second 32-bit part of that.
	const address, port = 1, unix.NFT_REG32_01
	return append(loadPort(p),
		&expr.Lookup{SourceRegister: 1, DestRegister: address, IsDestRegSet: true, SetName: portMap(p)},
		&expr.NAT{
			Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_IPV4, Specified: true,
			RegAddrMin: address, RegAddrMax: address, RegProtoMin: port, RegProtoMax: port,
		})
}

// masquerade gives packets the node's address.
func masquerade() rule { return rule{&expr.Masq{}} }

// masqueradeIn gives packets the node's address and a port of the range.
func masqueradeIn(ports portRange) rule {
	return rule{
		&expr.Immediate{Register: 1, Data: portBytes(ports.first)},
		&expr.Immediate{Register: 2, Data: portBytes(ports.last)},
		&expr.Masq{ToPorts: true, RegProtoMin: 1, RegProtoMax: 2},
	}
}
