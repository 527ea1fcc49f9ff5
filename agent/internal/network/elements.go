package network

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// protocols are those that ports are published for.
func protocols() []string { return []string{"tcp", "udp"} }

// portSet names one of the table's maps to the kernel.
func (n *Network) portSet(protocol string) *nftables.Set {
	return &nftables.Set{
		Table: &nftables.Table{Family: nftables.TableFamilyINet, Name: n.table()},
		Name:  portMap(protocol), IsMap: true,
	}
}

// publish opens a member's ports, in one transaction.
func (n *Network) publish(memberID string, r record) error {
	ip, err := netip.ParseAddr(r.IP)
	if err != nil {
		return err
	}
	err = n.change(r.Ports, (*nftables.Conn).SetAddElements, func(p PortMapping) nftables.SetElement {
		// Each part of the value has four bytes of its own.
		value := append(binary.BigEndian.AppendUint16(ip.AsSlice(), p.ContainerPort), 0, 0)
		return nftables.SetElement{Key: portKey(p), Val: value, Comment: memberID}
	}, nil)
	if err != nil {
		return fault.New(fault.Unavailable, "firewall_failed", "The node cannot publish ports: look for a firewall that "+
			"refuses changes.", err)
	}
	return nil
}

// unpublish closes a member's ports and removes the count of its flows where there is one, in one transaction: each
// that removes something waits some ten milliseconds for the kernel's readers. Of what a crash or somebody has left,
// some may be gone.
func (n *Network) unpublish(r record, counted net.IP) error {
	closing := func(ports []PortMapping, counted net.IP) error {
		return n.change(ports, (*nftables.Conn).SetDeleteElements, func(p PortMapping) nftables.SetElement {
			return nftables.SetElement{Key: portKey(p)}
		}, counted)
	}
	err := closing(r.Ports, counted)
	if !errors.Is(err, unix.ENOENT) {
		return err
	}
	for _, p := range r.Ports {
		if err := closing([]PortMapping{p}, nil); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("close port %d: %w", p.HostPort, err)
		}
	}
	if err := closing(nil, counted); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove the count of flows: %w", err)
	}
	return nil
}

func portKey(p PortMapping) []byte { return binary.BigEndian.AppendUint16(nil, p.HostPort) }

// change does the same to the elements of all ports, in one transaction; counted is the address whose count of flows
// goes with them, if any does.
func (n *Network) change(
	ports []PortMapping, do func(*nftables.Conn, *nftables.Set, []nftables.SetElement) error,
	element func(PortMapping) nftables.SetElement, counted net.IP,
) error {
	kernel, err := nftables.New()
	if err != nil {
		return err
	}
	for _, protocol := range protocols() {
		var elements []nftables.SetElement
		for _, p := range ports {
			if p.Protocol == protocol {
				elements = append(elements, element(p))
			}
		}
		if len(elements) == 0 {
			continue
		}
		if err := do(kernel, n.portSet(protocol), elements); err != nil {
			return err
		}
	}
	if counted != nil {
		if err := kernel.SetDeleteElements(n.flowCounts(), []nftables.SetElement{{Key: counted}}); err != nil {
			return err
		}
	}
	return kernel.Flush()
}

// removeTable removes the firewall table if it is there.
func (n *Network) removeTable() error {
	kernel, err := nftables.New()
	if err != nil {
		return err
	}
	kernel.DelTable(kernel.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: n.table()}))
	if err := kernel.Flush(); err != nil {
		return fmt.Errorf("remove the firewall table: %w", err)
	}
	return nil
}

// openPorts lists the ports that the table publishes for a member. It looks at the kernel, not at what was noted.
func (n *Network) openPorts(memberID string) ([]string, error) {
	// A list that is long comes in parts, and what changes between two of them may hide an element.
	const attempts = 100
	for range attempts {
		before, err := rulesetGeneration()
		if err != nil {
			return nil, err
		}
		open, err := n.listElements(memberID)
		if err != nil {
			return nil, fault.New(fault.Unavailable, "firewall_failed", "The node cannot read its firewall: look for a "+
				"program that changes it all the time.", err)
		}
		if after, err := rulesetGeneration(); err != nil || after == before {
			return open, err
		}
	}
	return nil, fault.New(fault.Unavailable, "firewall_failed", "The node cannot read its firewall: a program changes "+
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
		// The library hands on the kernel's words, not its number.
		if err != nil && !strings.Contains(err.Error(), unix.ENOENT.Error()) {
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
