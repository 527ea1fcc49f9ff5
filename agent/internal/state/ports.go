package state

import (
	"fmt"
	"slices"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// ServicePort is a port of one of a member's services.
type ServicePort struct {
	Service string
	Port    *protocol.Port
	// Fallback: only the fallback of the revision has it.
	Fallback bool
}

// PortPool says which ports of the node may be assigned.
type PortPool struct {
	// From and To bound the ports that the node itself chooses.
	From, To uint16
	// Tenants reports whether tenants may choose the port; the node itself never chooses such a port.
	Tenants func(port uint16) bool
	// Free reports whether no other member and no program uses a port.
	Free func(port uint16) bool
	// Published is the port on which the node publishes one of a service of the member already; 0 for none.
	Published func(service string, container uint16) uint16
}

// AssignPorts assigns a host port to each port of a member and stores the assignment, together with change. A port that
// the tenant chose gets that one or none. One that has a host port keeps it while that is free and the node's to give.
// The others are assigned in rotation: a client of a removed member must not reach the next one. Where the store has
// lost the member's ports, what runs of it keeps those that are published.
func (s *Store) AssignPorts(memberID string, want []ServicePort, pool PortPool,
	change func(*Member),
) ([]HostPort, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m, settings := s.d.members[memberID], s.d.meta
	m.ID = memberID
	a := assignment{pool: pool, last: settings.LastPort, taken: s.d.portsExcept(memberID)}
	var err error
	if m.Ports, err = a.assign(want, m.Ports); err != nil {
		return nil, err
	}
	settings.LastPort = a.last
	change(&m)
	return slices.Clone(m.Ports), s.write(
		func(b *batch) { b.json(preMember+memberID, m); b.json(keyMeta, settings) },
		func(d *data) { d.members[memberID], d.meta = m, settings },
	)
}

// portsExcept returns the host ports of all members but one.
func (d *data) portsExcept(memberID string) map[uint16]bool {
	taken := make(map[uint16]bool)
	for id, other := range d.members {
		if id == memberID {
			continue
		}
		for _, p := range other.Ports {
			taken[p.Host] = true
		}
	}
	return taken
}

// assignment assigns the ports of one member.
type assignment struct {
	pool PortPool
	// last is the port that the node chose last.
	last  uint16
	taken map[uint16]bool
}

func (a *assignment) usable(port uint16) bool {
	return port != 0 && !a.taken[port] && a.pool.Free(port)
}

// keeps reports whether a port that chooses no number keeps the one that it has. It gives back one that tenants may
// choose; only a fallback keeps it, which had chosen it.
func (a *assignment) keeps(w ServicePort, number uint16) bool {
	return a.usable(number) && (w.Fallback || !a.pool.Tenants(number))
}

func (a *assignment) assign(want []ServicePort, has []HostPort) ([]HostPort, error) {
	ports := make([]HostPort, len(want))
	for i, w := range want {
		ports[i] = HostPort{
			Name: w.Port.GetName(), Service: w.Service, Protocol: w.Port.GetProtocol(),
			Container: uint16(w.Port.GetContainerPort()),
		}
		chosen := uint16(w.Port.GetHostPort())
		if chosen == 0 {
			continue
		}
		if !a.usable(chosen) {
			return nil, fault.New(fault.Conflict, agent.CodePortTaken, fmt.Sprintf("Port %d of this node is in use.", chosen),
				nil)
		}
		ports[i].Host, a.taken[chosen] = chosen, true
	}
	for i, w := range want {
		var number uint16
		if k := slices.IndexFunc(has, func(old HostPort) bool { return old.Name == ports[i].Name }); k >= 0 {
			number = has[k].Host
		} else if len(has) == 0 {
			number = a.pool.Published(ports[i].Service, ports[i].Container)
		}
		if ports[i].Host == 0 && a.keeps(w, number) {
			ports[i].Host, a.taken[number] = number, true
		}
	}
	for i := range ports {
		if ports[i].Host != 0 {
			continue
		}
		port, ok := nextPort(a.last, a.pool.From, a.pool.To, func(p uint16) bool {
			return a.usable(p) && !a.pool.Tenants(p)
		})
		if !ok {
			return nil, fault.New(fault.Unavailable, codePortsExhausted, fmt.Sprintf("No port between %d and %d is free. Give "+
				"the agent a wider --port-range.", a.pool.From, a.pool.To), nil)
		}
		ports[i].Host, a.last, a.taken[port] = port, port, true
	}
	return ports, nil
}

// nextPort is the first usable port after the last one; the last one itself is tried last.
func nextPort(last, from, to uint16, usable func(uint16) bool) (port uint16, ok bool) {
	if last < from || last > to {
		last = to
	}
	for port = last; ; {
		if port++; port > to || port == 0 {
			port = from
		}
		if usable(port) {
			return port, true
		}
		if port == last {
			return 0, false
		}
	}
}
