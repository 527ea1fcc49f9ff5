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

	memberID string
	ip       netip.Addr
}

func (p publication) element() nftables.SetElement {
	// Each part of the value is padded to four bytes. The comment names the member to an administrator.
	value := append(binary.BigEndian.AppendUint16(p.ip.AsSlice(), p.ContainerPort), 0, 0)
	return nftables.SetElement{Key: portBytes(p.HostPort), Val: value, Comment: p.memberID}
}

func publications(memberID string, ip netip.Addr, ports []PortMapping) []publication {
	out := make([]publication, 0, len(ports))
	for _, p := range ports {
		out = append(out, publication{p, memberID, ip})
	}
	return out
}

// publicationsOf returns the published ports of the members whose networks are ready.
func (n *Network) publicationsOf(members []string) []publication {
	var out []publication
	for _, id := range members {
		if r, err := n.readRecord(id); err == nil && r.Ready {
			out = append(out, publications(id, r.IP, r.Ports)...)
		}
	}
	return out
}

// maxElements bounds the elements in one message: its attributes have lengths of 16 bits.
const maxElements = 200

func (n *Network) addPublications(kernel *nftables.Conn, ports []publication) error {
	for _, protocol := range protocols() {
		var elements []nftables.SetElement
		for _, p := range ports {
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

// publish opens a member's ports, in one transaction.
func (n *Network) publish(memberID string, ip netip.Addr, ports []PortMapping) error {
	if len(ports) == 0 {
		return nil
	}
	kernel, err := nftables.New()
	if err == nil {
		err = n.addPublications(kernel, publications(memberID, ip, ports))
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

// unpublish closes a member's ports and removes the count of its flows, in one transaction: each transaction that
// removes an element waits some ten milliseconds for the kernel's readers. After a crash or a change by another program
// some elements may be missing.
func (n *Network) unpublish(ports []PortMapping, counted net.IP) error {
	err := n.deleteElements(ports, counted)
	if !errors.Is(err, unix.ENOENT) {
		return err
	}
	for _, p := range ports {
		if err := n.deleteElements([]PortMapping{p}, nil); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("close port %d: %w", p.HostPort, err)
		}
	}
	if err := n.deleteElements(nil, counted); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove the count of flows: %w", err)
	}
	return nil
}

// deleteElements deletes published ports, and the count of flows of an address unless that is nil.
func (n *Network) deleteElements(ports []PortMapping, counted net.IP) error {
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

// openPorts lists the ports that the kernel publishes for a member, whatever the record says.
func (n *Network) openPorts(memberID string) ([]string, error) {
	// The kernel sends a long list in parts; a change between two of them may hide an element.
	const attempts = 100
	for range attempts {
		before, err := rulesetGeneration()
		if err != nil {
			return nil, err
		}
		open, err := n.listElements(memberID)
		if err != nil {
			return nil, fault.New(fault.Unavailable, codeFirewallFailed, "The node cannot read its firewall: look for a "+
				"program that changes it all the time.", err)
		}
		if after, err := rulesetGeneration(); err != nil || after == before {
			return open, err
		}
	}
	return nil, fault.New(fault.Unavailable, codeFirewallFailed, "The node cannot read its firewall: a program changes "+
		"it all the time.", nil)
}

func (n *Network) listElements(memberID string) ([]string, error) {
	kernel, err := nftables.New()
	if err != nil {
		return nil, err
	}
	var open []string
	for _, protocol := range protocols() {
		elements, err := kernel.GetSetElements(n.portSet(protocol))
		if err != nil && !isMissing(err) {
			return nil, err
		}
		for _, e := range elements {
			if e.Comment == memberID && len(e.Key) >= 2 {
				open = append(open, strconv.Itoa(int(binary.BigEndian.Uint16(e.Key))))
			}
		}
	}
	return slices.Compact(open), nil
}
