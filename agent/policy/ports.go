package policy

import (
	"fmt"

	"go.yaml.in/yaml/v3"

	"github.com/gpuaas/gpuaas/protocol"
)

// PortRange is a range of ports, both ends included. The zero value is none.
type PortRange struct {
	First, Last uint16
}

// UnmarshalYAML reads "8443" or "30000-30999".
func (r *PortRange) UnmarshalYAML(node *yaml.Node) error {
	first, last, ok := parsePorts(node.Value)
	if !ok {
		return fmt.Errorf("line %d: host_ports must be a port like 8443 or a range like 30000-30999", node.Line)
	}
	r.First, r.Last = first, last
	return nil
}

// Contains reports whether the port is one of the range.
func (r PortRange) Contains(port uint16) bool {
	return r.Last != 0 && r.First <= port && port <= r.Last
}

// Protocol returns the range for the node's facts; nil for none.
func (r PortRange) Protocol() *protocol.PortRange {
	if r.Last == 0 {
		return nil
	}
	return &protocol.PortRange{First: uint32(r.First), Last: uint32(r.Last)}
}

func (r PortRange) refuses(w *protocol.Workload) string {
	for _, s := range w.GetServices() {
		for _, p := range s.GetPorts() {
			switch port := p.GetHostPort(); {
			case port == 0:
			case r.Last == 0:
				return "The owner of this node lets nobody choose its ports."
			case port < uint32(r.First) || port > uint32(r.Last):
				return fmt.Sprintf("The owner of this node lets tenants choose ports from %d to %d; this workload asks for %d.",
					r.First, r.Last, port)
			}
		}
	}
	return ""
}
