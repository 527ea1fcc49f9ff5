package manifest

import (
	"math"
	"slices"
	"strconv"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// PortChoice is a port of a version with the port of the node that a tenant chose for it.
type PortChoice struct {
	Name string `json:"name"`
	// HostPort is 0 where the node chooses.
	HostPort uint32 `json:"host_port"`
}

func (p PortChoice) sameName(q PortChoice) bool { return p.Name == q.Name }

// HostPorts returns the port of the node of each of Ports.
func (c Choice) HostPorts() []uint32 {
	var ports []uint32
	for _, p := range c.Ports {
		ports = append(ports, p.HostPort)
	}
	return ports
}

// For returns the choice without the ports, volumes and requirements that the version does not have.
func (c Choice) For(m Manifest) Choice {
	c.Ports = slices.DeleteFunc(slices.Clone(c.Ports), func(p PortChoice) bool {
		return !m.Version.RuntimeProfile.hasPort(p.Name)
	})
	c.Volumes = m.forVolumes(c.Volumes)
	if m.Version.RuntimeProfile.Environment == nil {
		c.Environment = nil
	}
	return c
}

func (p RuntimeProfile) hasPort(name string) bool {
	return slices.ContainsFunc(p.All(), func(s Service) bool {
		return slices.ContainsFunc(s.Ports, func(q Port) bool { return q.Name == name })
	})
}

// findPorts finds what contradicts the version, or itself, in a choice of ports. Of two that contradict each other it
// names the first: a request's come before what an instance has.
func (p RuntimeProfile) findPorts(f *findings, chosen []PortChoice) {
	for n, c := range chosen {
		at := "/ports/" + strconv.Itoa(n)
		rest := chosen[n+1:]
		switch {
		case !p.hasPort(c.Name):
			f.add(at+"/name", "the version has no port of this name")
		case slices.ContainsFunc(rest, c.sameName):
			f.add(at+"/name", "is named twice")
		case c.HostPort > math.MaxUint16:
			f.add(at+"/host_port", "must be at most 65535")
		case c.HostPort != 0 && slices.ContainsFunc(rest, func(q PortChoice) bool { return q.HostPort == c.HostPort }):
			f.add(at+"/host_port", "is chosen twice")
		}
	}
}

func (p RuntimeProfile) checkPorts(chosen []PortChoice) error {
	f := &findings{}
	if p.findPorts(f, chosen); len(f.fields) == 0 {
		return nil
	}
	return invalid(fault.Unprocessable, CodeShapeRefused, "The version cannot be published on these ports.", f.fields)
}

func hostPortOf(chosen []PortChoice, name string) uint32 {
	for _, c := range chosen {
		if c.Name == name {
			return c.HostPort
		}
	}
	return 0
}

// portsOf reads the chosen ports of the node from the services.
func portsOf(services []*protocol.Service) []PortChoice {
	var chosen []PortChoice
	for _, s := range services {
		for _, p := range s.GetPorts() {
			if p.GetHostPort() != 0 {
				chosen = append(chosen, PortChoice{p.GetName(), p.GetHostPort()})
			}
		}
	}
	return chosen
}

// HostPortsOf returns the ports of the node that were chosen for the services.
func HostPortsOf(services []*protocol.Service) []uint32 {
	return Choice{Ports: portsOf(services)}.HostPorts()
}
