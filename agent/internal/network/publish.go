package network

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/loop"
)

// isCopyOf reports whether two attachments are for the same service.
func isCopyOf(id, other string) bool {
	member, attachment := ParseID(id)
	otherMember, otherAttachment := ParseID(other)
	service, _ := agent.ParseAttachment(attachment)
	otherService, _ := agent.ParseAttachment(otherAttachment)
	return member == otherMember && service == otherService
}

// Publish leads the ports to an attachment, away from other copies of its service, in one transaction. Connections that
// are open stay where they are. After a crash the record decides which copy has a port.
func (n *Network) Publish(ctx context.Context, id string, ports []PortMapping) error {
	if err := errors.Join(checkID(id), checkPorts(ports)); err != nil {
		return err
	}
	unlock, err := n.attachments.Lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	if err := n.checkPortsFree(id, ports); err != nil {
		return err
	}
	release, err := n.share(ctx)
	if err != nil {
		return err
	}
	defer release()
	n.peering.Lock()
	defer n.peering.Unlock()
	r, err := n.readRecord(id)
	if err != nil || !r.Ready {
		return fault.New(fault.Unavailable, codeNetworkFailed, "The service's network is not complete.", err)
	}
	others, err := n.copiesOf(id)
	if err != nil {
		return err
	}
	if err := n.takeReservations(id, slices.Collect(maps.Keys(others)), ports); err != nil {
		return err
	}
	leaves := publications(id, r.IP, r.Ports)
	for other, o := range others {
		leaves = append(leaves, publications(other, o.IP, o.Ports)...)
		r.Turn = max(r.Turn, o.Turn+1)
	}
	r.Ports = ports
	if err := n.writeRecord(id, r); err != nil {
		return err
	}
	failpoint.Hit("agent/publish/recorded")
	if err := n.movePorts(leaves, publications(id, r.IP, ports)); err != nil {
		return err
	}
	failpoint.Hit("agent/publish/moved")
	for other, o := range others {
		o.Ports = nil
		if err := n.writeRecord(other, o); err != nil {
			return err
		}
	}
	return nil
}

// copiesOf returns the records of the other attachments of a service that are ready and may have ports.
func (n *Network) copiesOf(id string) (map[string]record, error) {
	all, err := n.List()
	if err != nil {
		return nil, err
	}
	others := map[string]record{}
	for _, other := range all {
		if other == id || !isCopyOf(id, other) {
			continue
		}
		if r, err := n.readRecord(other); err == nil && r.Ready && len(r.Ports) > 0 {
			others[other] = r
		}
	}
	return others, nil
}

// takeReservations gives an attachment the reserved ports of others, and reserves those that none has.
func (n *Network) takeReservations(id string, others []string, ports []PortMapping) error {
	n.mu.Lock()
	for _, other := range others {
		n.reserved[id] = append(n.reserved[id], n.reserved[other]...)
		delete(n.reserved, other)
	}
	n.mu.Unlock()
	return n.reservePorts(id, ports)
}

// movePorts takes ports out of the table and puts others in, in one transaction. Where the table lacks some of them,
// because another program changed it, they are moved one after the other.
func (n *Network) movePorts(out, in []publication) error {
	kernel, err := nftables.New()
	if err != nil {
		return err
	}
	for _, protocol := range protocols() {
		var elements []nftables.SetElement
		for i, p := range out {
			again := slices.ContainsFunc(out[:i], func(q publication) bool { return q.conflictsWith(p.PortMapping) })
			if p.Protocol == protocol.name && !again {
				elements = append(elements, nftables.SetElement{Key: portBytes(p.HostPort)})
			}
		}
		if len(elements) > 0 {
			if err := kernel.SetDeleteElements(n.portSet(protocol), elements); err != nil {
				return err
			}
		}
	}
	if err := n.addOpenings(kernel, openings{ports: in}); err != nil {
		return err
	}
	err = kernel.Flush()
	if !errors.Is(err, unix.ENOENT) {
		return err
	}
	var closing []PortMapping
	for _, p := range out {
		closing = append(closing, p.PortMapping)
	}
	if err := n.close(closing, nil, nil); err != nil {
		return err
	}
	return n.open(openings{ports: in})
}

// drainEvery is the interval at which Drain lists an attachment's connections.
const drainEvery = 50 * time.Millisecond

// Drain returns once no TCP connection from outside to the attachment is open, or after limit.
func (n *Network) Drain(ctx context.Context, id string, limit time.Duration) error {
	ip, known := n.addressOf(id)
	if !known {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		open, err := openConnections(ip)
		if err != nil {
			return fmt.Errorf("list the connections of %s: %w", id, err)
		}
		if open == 0 || !loop.Pause(ctx, drainEvery) {
			return nil
		}
	}
}

// openConnections counts the TCP connections to an address that have not been closed by both sides.
func openConnections(ip netip.Addr) (open int, err error) {
	flows, err := listFlows(net.IP(ip.AsSlice()), nl.CTA_TUPLE_REPLY)
	for _, flow := range flows {
		if tcpIsOpen(flow) {
			open++
		}
	}
	return open, err
}
