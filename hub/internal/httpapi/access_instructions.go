package httpapi

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/query"
)

// addInstructions tells for each endpoint how the reader reaches it from the own machine. A node names itself and its
// endpoints: nothing of that gets into a command line that is more than a name.
func addInstructions(view *AppInstance, i query.Instance) {
	n := 0
	for _, m := range i.Members {
		for _, e := range m.Endpoints {
			view.Endpoints[n].Instructions = instructions(i, m, e)
			n++
		}
	}
}

func instructions(i query.Instance, m instance.Member, e instance.Endpoint) (out AccessInstructions) {
	if !isLabel(e.Name) {
		return out
	}
	out.PortForward = fmt.Sprintf("gpuaas port-forward %s %s --project %s", i.ID, e.Name, i.ProjectID)
	if len(i.Members) > 1 {
		out.PortForward += " --member " + m.ID
	}
	host := i.Hostnames[m.NodeID]
	_, err := netip.ParseAddr(e.Host)
	for label := range strings.SplitSeq(strings.ToLower(host), ".") {
		if err != nil || !isLabel(label) {
			return out
		}
	}
	out.SSHTunnel = fmt.Sprintf("ssh -N -L %d:%s:%d %s", e.Port, e.Host, e.Port, host)
	return out
}

// isLabel reports whether a name is a label of a host's name (RFC 1123 §2.1), in lower case.
func isLabel(name string) bool {
	for _, c := range []byte(name) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return name != "" && len(name) <= 63 && name[0] != '-' && name[len(name)-1] != '-'
}
