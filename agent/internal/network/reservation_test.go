package network_test

import (
	"net"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/network"
	"github.com/gpuaas/gpuaas/protocol"
)

// occupied says whether a program of the host is refused the port.
func occupied(t *testing.T, address string) bool {
	t.Helper()
	l, err := net.Listen("tcp4", address)
	if err != nil {
		require.ErrorContains(t, err, "address already in use")
		return true
	}
	require.NoError(t, l.Close())
	return false
}

func TestNoProgramOfTheHostTakesAPublishedPort(t *testing.T) {
	f := newFixture(t)
	a := f.setup("m1", tcp(21001, 8080), network.PortMapping{HostPort: 21002, ContainerPort: 53, Protocol: "udp"})
	serve(t, a.NetNSPath, ":8080")
	held := func(when string) {
		t.Helper()
		require.True(t, occupied(t, "127.0.0.1:21001"), when)
		require.True(t, occupied(t, ":21001"), when)
		_, err := net.ListenPacket("udp4", "127.0.0.1:21002")
		require.Error(t, err, when)
		_, err = call(t, "", "127.0.0.1:21001", reachable)
		require.NoError(t, err, "%s: it is published all the same", when)
		require.True(t, f.n.PortFree("m1", 21001), "%s: its own port is free to the member", when)
		require.False(t, f.n.PortFree("m2", 21001), when)
	}
	held("from the start")
	f.n = f.open()
	require.False(t, occupied(t, "127.0.0.1:21001"), "nobody holds it while no agent runs")
	_, err := f.n.EnsureRules(ctxOf(t))
	require.NoError(t, err)
	held("after a restart of the agent")
	require.NoError(t, f.n.Remove(ctxOf(t), "m1"))
	require.False(t, occupied(t, "127.0.0.1:21001"))
}

// The ports that an owner gives to tenants may lie below 1024, and the agent has the rights of its unit alone.
func TestTheUnitLetsTheAgentPublishEachPort(t *testing.T) {
	f := newFixture(t)
	unit, err := os.ReadFile("../../../systemd/gpuaas-agent.service")
	require.NoError(t, err)
	free := make(chan bool, 1)
	go func() {
		runtime.LockOSThread() // for ever: the thread ends with what it has given up
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var sets [2]unix.CapUserData
		if unix.Capget(&header, &sets[0]) == nil && !strings.Contains(string(unit), " CAP_NET_BIND_SERVICE") {
			sets[0].Effective &^= 1 << unix.CAP_NET_BIND_SERVICE
			_ = unix.Capset(&header, &sets[0])
		}
		free <- f.n.PortFree("m1", 1021)
	}()
	require.True(t, <-free)
}

// Its port is no other test's: the kernel keeps it for a minute after the program's last connection.
func TestAPortThatAProgramOfTheHostHasIsNotPublished(t *testing.T) {
	f := newFixture(t)
	serve(t, "", "127.0.0.1:21090")
	require.False(t, f.n.PortFree("m1", 21090))
	_, err := f.n.Setup(ctxOf(t), "m1", []network.PortMapping{tcp(21090, 8080)}, nil)
	require.ErrorContains(t, err, "port_taken")
	_, err = call(t, "", "127.0.0.1:21090", reachable)
	require.NoError(t, err, "the program keeps its connections")
}

func TestAPortThatWasTakenWhileNoAgentRanIsReported(t *testing.T) {
	f := newFixture(t)
	f.setup("m1", tcp(21001, 8080))
	f.n = f.open()
	intruder, err := net.Listen("tcp4", "127.0.0.1:21001")
	require.NoError(t, err)
	_, err = f.n.EnsureRules(ctxOf(t))
	require.NoError(t, err)
	require.Contains(t, f.n.Conditions(), protocol.ConditionPortInUse)
	require.NoError(t, intruder.Close())
	_, err = f.n.EnsureRules(ctxOf(t))
	require.NoError(t, err)
	require.Empty(t, f.n.Conditions())
	require.True(t, occupied(t, "127.0.0.1:21001"))
}

func TestOnlyAnotherProgramTakesAPort(t *testing.T) {
	require.True(t, agent.IsPortTaken(network.Unreserved(80, unix.EADDRINUSE)))
	refused := network.Unreserved(80, unix.EACCES)
	require.False(t, agent.IsPortTaken(refused))
	require.ErrorIs(t, refused, unix.EACCES)
}
