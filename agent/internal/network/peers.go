package network

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// peerSet holds the pairs of addresses between which packets pass: those of the services of one member.
const peerSetName = "peers"

func (n *Network) peerSet() *nftables.Set {
	return &nftables.Set{
		Table: n.table(), Name: peerSetName,
		KeyType: nftables.MustConcatSetType(nftables.TypeIPAddr, nftables.TypeIPAddr),
	}
}

// peering is the way from one service of a member to another.
type peering struct {
	memberID string
	from, to netip.Addr
}

func (p peering) key() []byte { return append(p.from.AsSlice(), p.to.AsSlice()...) }

func elementsOf(peers []peering) []nftables.SetElement {
	out := make([]nftables.SetElement, 0, len(peers))
	for _, p := range peers {
		out = append(out, nftables.SetElement{Key: p.key(), Comment: p.memberID})
	}
	return out
}

// peerings are the ways between an address and others of its member.
func peerings(memberID string, ip netip.Addr, others []netip.Addr) []peering {
	out := make([]peering, 0, 2*len(others))
	for _, other := range others {
		out = append(out, peering{memberID, ip, other}, peering{memberID, other, ip})
	}
	return out
}

// peersOf are the ways between an attachment and the others of its member that are ready. The caller holds peering.
func (n *Network) peersOf(id string, ip netip.Addr) []peering {
	all, err := n.List()
	if err != nil {
		return nil
	}
	var others []netip.Addr
	for _, other := range all {
		if r, err := n.readRecord(other); other != id && memberOf(other) == memberOf(id) && err == nil && r.Ready {
			others = append(others, r.IP)
		}
	}
	return peerings(memberOf(id), ip, others)
}

// peersWith lists the ways from and to an address that the kernel has, whatever the records say.
func (n *Network) peersWith(ip netip.Addr) ([]peering, error) {
	if !ip.IsValid() {
		return nil, nil
	}
	all, err := n.listPeers()
	return slices.DeleteFunc(all, func(p peering) bool { return p.from != ip && p.to != ip }), err
}

func (n *Network) listPeers() ([]peering, error) {
	kernel, err := nftables.New()
	if err != nil {
		return nil, err
	}
	elements, err := kernel.GetSetElements(n.peerSet())
	if err != nil && !isMissing(err) {
		return nil, fmt.Errorf("list the peers: %w", err)
	}
	out := make([]peering, 0, len(elements))
	for _, e := range elements {
		from, okFrom := netip.AddrFromSlice(e.Key[:min(4, len(e.Key))])
		to, okTo := netip.AddrFromSlice(e.Key[min(4, len(e.Key)):])
		if okFrom && okTo {
			out = append(out, peering{e.Comment, from, to})
		}
	}
	return out, nil
}

// peerDifference names a way that the table lacks, or one between addresses of two members.
func (n *Network) peerDifference(want []peering) (string, error) {
	have, err := n.listPeers()
	if err != nil {
		return "", err
	}
	for _, p := range want {
		if !slices.Contains(have, p) {
			return fmt.Sprintf("%s does not reach its peer %s", p.from, p.to), nil
		}
	}
	members := map[netip.Addr]string{}
	for id, ip := range n.addresses() {
		members[ip] = memberOf(id)
	}
	for _, p := range have {
		if members[p.from] == "" || members[p.from] != members[p.to] {
			return fmt.Sprintf("%s reaches %s", p.from, p.to), nil
		}
	}
	return "", nil
}

// betweenPeers matches IPv4 packets from one service of a member to another.
func betweenPeers() rule {
	return append(loadAddress(sourceOffset),
		&expr.Payload{
			DestRegister: unix.NFT_REG32_01, Base: expr.PayloadBaseNetworkHeader, Offset: destinationOffset, Len: 4,
		},
		&expr.Lookup{SourceRegister: 1, SetName: peerSetName})
}
