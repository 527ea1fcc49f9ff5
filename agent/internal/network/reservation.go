package network

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// portReservation is a socket that is bound to a published port and does not listen: a program of the host that binds
// the port gets an error, instead of losing its connections to the member.
type portReservation struct {
	protocol string
	port     uint16
	socket   int
}

// reservePorts reserves these ports for an attachment and releases its others. On an error it keeps those that it could
// reserve.
func (n *Network) reservePorts(id string, ports []PortMapping) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	var kept []portReservation
	for _, h := range n.reserved[id] {
		if slices.ContainsFunc(ports, h.is) {
			kept = append(kept, h)
		} else {
			_ = unix.Close(h.socket)
		}
	}
	var errs []error
	for _, p := range ports {
		if slices.ContainsFunc(kept, func(h portReservation) bool { return h.is(p) }) {
			continue
		}
		socket, err := bindPort(p)
		if err != nil {
			errs = append(errs, unreserved(p.HostPort, err))
			continue
		}
		kept = append(kept, portReservation{p.Protocol, p.HostPort, socket})
	}
	if n.reserved[id] = kept; len(kept) == 0 {
		delete(n.reserved, id)
	}
	return errors.Join(errs...)
}

func (h portReservation) is(p PortMapping) bool {
	return h.protocol == p.Protocol && h.port == p.HostPort
}

// unreserved says why a port could not be bound.
func unreserved(port uint16, cause error) error {
	if !errors.Is(cause, unix.EADDRINUSE) {
		return fault.New(fault.Unavailable, codeNetworkFailed, fmt.Sprintf("The agent cannot bind port %d of this node.",
			port), cause)
	}
	return fault.New(fault.Conflict, agent.CodePortTaken, fmt.Sprintf("Another program of this node uses port %d.", port),
		cause)
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

// PortFree reports whether a TCP port can be published for the member: it is reserved for the member, or unused.
func (n *Network) PortFree(memberID string, port uint16) bool {
	p := PortMapping{HostPort: port, Protocol: "tcp"}
	n.mu.Lock()
	defer n.mu.Unlock()
	for id, ports := range n.reserved {
		if slices.ContainsFunc(ports, func(h portReservation) bool { return h.is(p) }) {
			return memberOf(id) == memberID
		}
	}
	socket, err := bindPort(p)
	return err == nil && unix.Close(socket) == nil
}

// reserveAllPorts reserves the ports of all attachments, also those that an earlier agent has published.
func (n *Network) reserveAllPorts(ctx context.Context, all []string) error {
	var errs []error
	for _, id := range all {
		unlock, err := n.attachments.Lock(ctx, id)
		if err != nil {
			return err
		}
		if r, err := n.readRecord(id); err == nil && r.Ready {
			errs = append(errs, n.reservePorts(id, r.Ports))
		}
		unlock()
	}
	n.portInUse.Store(slices.ContainsFunc(errs, agent.IsPortTaken))
	return errors.Join(errs...)
}

// Abandon releases the reserved ports as the end of the process does; the networks stay. The network is not used
// afterwards.
func (n *Network) Abandon() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, ports := range n.reserved {
		for _, h := range ports {
			_ = unix.Close(h.socket)
		}
	}
	clear(n.reserved)
}
