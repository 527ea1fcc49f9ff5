package network

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// protocols are the protocols of published ports.
func protocols() []transportProtocol { return []transportProtocol{tcp, udp} }

// portMap is the table's map from the published ports of a protocol to members' addresses and ports.
func portMap(p transportProtocol) string { return p.name + "_ports" }

func (n *Network) portSet(p transportProtocol) *nftables.Set {
	return &nftables.Set{
		Table: n.table(), Name: portMap(p), IsMap: true, KeyByteOrder: binaryutil.BigEndian,
		KeyType:  nftables.TypeInetService,
		DataType: nftables.MustConcatSetType(nftables.TypeIPAddr, nftables.TypeInetService),
	}
}

// publication is a published port in the firewall table.
type publication struct {
	PortMapping

	id string
	ip netip.Addr
}

func (p publication) element() nftables.SetElement {
	// Each part of the value is padded to four bytes. The comment names the attachment to an administrator.
	value := append(binary.BigEndian.AppendUint16(p.ip.AsSlice(), p.ContainerPort), 0, 0)
	return nftables.SetElement{Key: portBytes(p.HostPort), Val: value, Comment: p.id}
}

func publications(id string, ip netip.Addr, ports []PortMapping) []publication {
	out := make([]publication, 0, len(ports))
	for _, p := range ports {
		out = append(out, publication{p, id, ip})
	}
	return out
}

// PublishedOn is the host port that leads to a TCP port of a service; 0 for none.
func (n *Network) PublishedOn(memberID, service string, port uint16) uint16 {
	all, _ := n.List() // without a list there is none
	for _, id := range all {
		r, err := n.readRecord(id)
		if err != nil || !r.Ready || !isCopyOf(ID(memberID, service), id) {
			continue
		}
		for _, p := range r.Ports {
			if p.Protocol == tcp.name && p.ContainerPort == port {
				return p.HostPort
			}
		}
	}
	return 0
}

// openings are what the firewall table lets through for single attachments.
type openings struct {
	ports []publication
	peers []peering
}

// openingsOf returns the published ports and the peers of the attachments that are ready.
func (n *Network) openingsOf(all []string) openings {
	var out openings
	addresses := map[string][]netip.Addr{} // by member
	turns := map[string]uint64{}           // by port
	for _, id := range all {
		if r, err := n.readRecord(id); err == nil && r.Ready {
			out.publish(publications(id, r.IP, r.Ports), r.Turn, turns)
			out.peers = append(out.peers, peerings(memberOf(id), r.IP, addresses[memberOf(id)])...)
			addresses[memberOf(id)] = append(addresses[memberOf(id)], r.IP)
		}
	}
	return out
}

// publish adds the ports of an attachment. Of two that a crash left with the same port, the later one has it.
func (o *openings) publish(ports []publication, turn uint64, turns map[string]uint64) {
	for _, p := range ports {
		key := fmt.Sprint(p.Protocol, p.HostPort)
		i := slices.IndexFunc(o.ports, func(q publication) bool { return q.conflictsWith(p.PortMapping) })
		switch {
		case i < 0:
			o.ports, turns[key] = append(o.ports, p), turn
		case turn > turns[key]:
			o.ports[i], turns[key] = p, turn
		}
	}
}

// maxElements bounds the elements in one message: its attributes have lengths of 16 bits.
const maxElements = 200

func (n *Network) addOpenings(kernel *nftables.Conn, o openings) error {
	for part := range slices.Chunk(elementsOf(o.peers), maxElements) {
		if err := kernel.SetAddElements(n.peerSet(), part); err != nil {
			return err
		}
	}
	for _, protocol := range protocols() {
		var elements []nftables.SetElement
		for _, p := range o.ports {
			if p.Protocol == protocol.name {
				elements = append(elements, p.element())
			}
		}
		for part := range slices.Chunk(elements, maxElements) {
			if err := kernel.SetAddElements(n.portSet(protocol), part); err != nil {
				return err
			}
		}
	}
	return nil
}

// open adds ports and peers, in one transaction.
func (n *Network) open(o openings) error {
	if len(o.ports)+len(o.peers) == 0 {
		return nil
	}
	kernel, err := nftables.New()
	if err == nil {
		err = n.addOpenings(kernel, o)
	}
	if err == nil {
		err = kernel.Flush()
	}
	if err != nil {
		return fault.New(fault.Unavailable, codeFirewallFailed, "The node cannot publish ports: look for a firewall that "+
			"refuses changes.", err)
	}
	return nil
}

// close closes an attachment's ports, removes the count of its flows and its peers, in one transaction: each one that
// removes an element waits some ten milliseconds for the kernel's readers. After a crash or a change by another program
// some elements may be missing.
func (n *Network) close(ports []PortMapping, counted net.IP, peers []peering) error {
	err := n.deleteElements(ports, counted, peers)
	if !errors.Is(err, unix.ENOENT) {
		return err
	}
	for _, p := range ports {
		if err := n.deleteElements([]PortMapping{p}, nil, nil); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("close port %d: %w", p.HostPort, err)
		}
	}
	for _, p := range peers {
		if err := n.deleteElements(nil, nil, []peering{p}); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("close the way from %s to %s: %w", p.from, p.to, err)
		}
	}
	if err := n.deleteElements(nil, counted, nil); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove the count of flows: %w", err)
	}
	return nil
}

// deleteElements deletes published ports, peers, and the count of flows of an address unless that is nil.
func (n *Network) deleteElements(ports []PortMapping, counted net.IP, peers []peering) error {
	kernel, err := nftables.New()
	if err != nil {
		return err
	}
	for _, protocol := range protocols() {
		var elements []nftables.SetElement
		for _, p := range ports {
			if p.Protocol == protocol.name {
				elements = append(elements, nftables.SetElement{Key: portBytes(p.HostPort)})
			}
		}
		if len(elements) > 0 {
			if err := kernel.SetDeleteElements(n.portSet(protocol), elements); err != nil {
				return err
			}
		}
	}
	if counted != nil {
		err := kernel.SetDeleteElements(n.flowSet(openFlowSet), []nftables.SetElement{{Key: counted}})
		if err != nil {
			return err
		}
	}
	for part := range slices.Chunk(elementsOf(peers), maxElements) {
		if err := kernel.SetDeleteElements(n.peerSet(), part); err != nil {
			return err
		}
	}
	return kernel.Flush()
}

// portDifference names a published port that the table's maps lack. They may have ports of members that are not ready.
func (n *Network) portDifference(kernel *nftables.Conn, ports []publication) (string, error) {
	for _, protocol := range protocols() {
		elements, err := kernel.GetSetElements(n.portSet(protocol))
		if err != nil {
			return "", err
		}
		for _, p := range ports {
			want := p.element()
			if p.Protocol == protocol.name && !slices.ContainsFunc(elements, func(e nftables.SetElement) bool {
				return slices.Equal(e.Key, want.Key) && slices.Equal(e.Val, want.Val) && e.Comment == want.Comment
			}) {
				return fmt.Sprintf("%s port %d is not published", p.Protocol, p.HostPort), nil
			}
		}
	}
	return "", nil
}

// openPorts lists the ports that the kernel publishes for a member, and the number of its peers, whatever the records
// say.
func (n *Network) openPorts(memberID string) (ports []string, peers int, err error) {
	// The kernel sends a long list in parts; a change between two of them may hide an element.
	const attempts = 100
	for range attempts {
		before, err := rulesetGeneration()
		if err != nil {
			return nil, 0, err
		}
		if ports, peers, err = n.listElements(memberID); err != nil {
			return nil, 0, fault.New(fault.Unavailable, codeFirewallFailed, "The node cannot read its firewall: look for a "+
				"program that changes it all the time.", err)
		}
		if after, err := rulesetGeneration(); err != nil || after == before {
			return ports, peers, err
		}
	}
	return nil, 0, fault.New(fault.Unavailable, codeFirewallFailed, "The node cannot read its firewall: a program "+
		"changes it all the time.", nil)
}

func (n *Network) listElements(memberID string) (ports []string, peers int, err error) {
	kernel, err := nftables.New()
	if err != nil {
		return nil, 0, err
	}
	for _, protocol := range protocols() {
		elements, err := kernel.GetSetElements(n.portSet(protocol))
		if err != nil && !isMissing(err) {
			return nil, 0, err
		}
		for _, e := range elements {
			if memberOf(e.Comment) == memberID && len(e.Key) >= 2 {
				ports = append(ports, strconv.Itoa(int(binary.BigEndian.Uint16(e.Key))))
			}
		}
	}
	elements, err := kernel.GetSetElements(n.peerSet())
	if err != nil && !isMissing(err) {
		return nil, 0, err
	}
	for _, e := range elements {
		if e.Comment == memberID {
			peers++
		}
	}
	return slices.Compact(ports), peers, nil
}
