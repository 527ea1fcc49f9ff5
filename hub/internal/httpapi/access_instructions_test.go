package httpapi

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/query"
)

// What a node says about itself is pasted into a terminal: it must be a name and nothing else.
func TestInstructionsHoldNamesOnly(t *testing.T) {
	ask := func(name, host, hostname string) AccessInstructions {
		m := instance.Member{NodeID: "n"}
		e := instance.Endpoint{Name: name, Host: host, Port: 20000}
		i := instance.Instance{ID: "i", ProjectID: "p", Members: []instance.Member{m}}
		return instructions(query.Instance{Instance: i, Hostnames: map[string]string{"n": hostname}}, m, e)
	}
	require.Equal(t, AccessInstructions{
		PortForward: "gpuaas port-forward i http --project p",
		SSHTunnel:   "ssh -N -L 20000:127.0.0.1:20000 GPU-1.example",
	}, ask("http", "127.0.0.1", "GPU-1.example"))
	for _, bad := range []string{"", "-oProxyCommand=x", "a b", "a;b", "$(x)", "a\nb", "a..b", "ä", "a_b"} {
		require.Empty(t, ask("http", "127.0.0.1", bad).SSHTunnel, bad)
		require.Empty(t, ask(bad, "127.0.0.1", "n1"), bad)
		require.Empty(t, ask("http", bad, "n1").SSHTunnel, bad)
	}
}
