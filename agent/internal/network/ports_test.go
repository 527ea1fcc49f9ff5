package network_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/network"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestPublishedPortsOutliveTheAgent(t *testing.T) {
	f := newFixture(t)
	a := f.setup("m1", tcp(21001, 8080))
	serve(t, a.NetNSPath, ":8080")
	f.n = f.open()
	f.setup("m2", tcp(21002, 8080)) // makes the firewall table anew
	_, err := call(t, "", "127.0.0.1:21001", reachable)
	require.NoError(t, err)
}

func TestPortThatSomebodyHasClosedKeepsNoOtherOpen(t *testing.T) {
	f := newFixture(t)
	f.setup(network.ID("stays", "web"), tcp(21000, 80))
	f.setup("m1", tcp(21001, 80), tcp(21002, 80), network.PortMapping{HostPort: 21002, ContainerPort: 53, Protocol: "udp"})
	sh(t, "nft delete element inet gpuaas_"+f.cfg.Bridge+" tcp_ports '{ 21001 }'")
	require.NoError(t, f.n.Remove(ctxOf(t), "m1"))
	left, err := f.n.Leftovers(ctxOf(t), "m1")
	require.NoError(t, err)
	require.Empty(t, left)
	require.NotRegexp(t, "2100[12]", sh(t, "nft list ruleset"))
	left, err = f.n.Leftovers(ctxOf(t), "stays")
	require.NoError(t, err)
	require.Contains(t, left, protocol.AbsentPort+" 21000")
}

func TestAMemberPublishesABoundedNumberOfPorts(t *testing.T) {
	f := newFixture(t)
	var ports []network.PortMapping
	for i := range uint16(33) {
		ports = append(ports, tcp(41000+i, 8000+i))
	}
	_, err := f.n.Setup(ctxOf(t), "m1", ports, nil)
	require.ErrorContains(t, err, "may publish 32 ports")
	left, err := f.n.Leftovers(ctxOf(t), "m1")
	require.NoError(t, err)
	require.Empty(t, left)
	f.setup("m1", ports[:32]...)
}
