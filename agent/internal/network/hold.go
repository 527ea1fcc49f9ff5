package network

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// heldPort is a socket that is bound to a published port and does not listen: another program of the host that wants
// the port is refused, instead of losing its connections to the member.
type heldPort struct {
	protocol string
	port     uint16
	socket   int
}

// hold holds all of a member's ports and lets go of others that were its. It holds what it can when it fails.
func (n *Network) hold(memberID string, ports []PortMapping) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	var held []heldPort
	for _, h := range n.held[memberID] {
		if slices.ContainsFunc(ports, h.is) {
			held = append(held, h)
		} else {
			_ = unix.Close(h.socket)
		}
	}
	var errs []error
	for _, p := range ports {
		if slices.ContainsFunc(held, func(h heldPort) bool { return h.is(p) }) {
			continue
		}
		socket, err := bindPort(p)
		if err != nil {
			errs = append(errs, portInUse(p.HostPort, err))
			continue
		}
		held = append(held, heldPort{p.Protocol, p.HostPort, socket})
	}
	if n.held[memberID] = held; len(held) == 0 {
		delete(n.held, memberID)
	}
	return errors.Join(errs...)
}

func (h heldPort) is(p PortMapping) bool { return h.protocol == p.Protocol && h.port == p.HostPort }

func portInUse(port uint16, cause error) error {
	return fault.New(fault.Conflict, "port_taken", fmt.Sprintf("Another program of this node uses port %d.", port), cause)
}

// bindPort binds without SO_REUSEADDR: with it, others who set it could bind to the same port.
func bindPort(p PortMapping) (socket int, err error) {
	kind := unix.SOCK_STREAM
	if p.Protocol == "udp" {
		kind = unix.SOCK_DGRAM
	}
	socket, err = unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	address := &unix.SockaddrInet4{Port: int(p.HostPort), Addr: netip.MustParseAddr(publishedOn).As4()}
	if err := unix.Bind(socket, address); err != nil {
		return -1, errors.Join(err, unix.Close(socket))
	}
	return socket, nil
}

// PortFree reports whether a TCP port can be published for the member: it holds the port already, or nobody has it.
func (n *Network) PortFree(memberID string, port uint16) bool {
	p := PortMapping{HostPort: port, Protocol: "tcp"}
	n.mu.Lock()
	defer n.mu.Unlock()
	for member, held := range n.held {
		if slices.ContainsFunc(held, func(h heldPort) bool { return h.is(p) }) {
			return member == memberID
		}
	}
	socket, err := bindPort(p)
	return err == nil && unix.Close(socket) == nil
}

// holdAll holds the ports of all members, also those that an earlier agent has published.
func (n *Network) holdAll(members []string) error {
	var errs []error
	for _, id := range members {
		unlock := n.lock(id)
		if r, err := n.readRecord(id); err == nil && r.Ready {
			errs = append(errs, n.hold(id, r.Ports))
		}
		unlock()
	}
	err := errors.Join(errs...)
	n.portInUse.Store(err != nil)
	return err
}

// Abandon lets go of the ports as the end of the process does; the networks stay. The network is not used afterwards.
func (n *Network) Abandon() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, held := range n.held {
		for _, h := range held {
			_ = unix.Close(h.socket)
		}
	}
	clear(n.held)
}
