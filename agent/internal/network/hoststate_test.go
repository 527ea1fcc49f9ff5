package network_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/network"
	"github.com/gpuaas/gpuaas/e2e/leakcheck"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestLastOneTakesEverythingAlong(t *testing.T) {
	f := newFixture(t)
	// A host that takes no redirects: the kernel allows them where forwarding is turned off.
	sh(t, "echo 0 > /proc/sys/net/ipv4/conf/all/accept_redirects")
	t.Cleanup(func() { sh(t, "echo 1 > /proc/sys/net/ipv4/conf/all/accept_redirects") })
	sysctls := func() map[string]string {
		s, err := leakcheck.Take(leakcheck.Scope{Files: []string{filepath.Dir(f.outside)}})
		require.NoError(t, err)
		return s.Items[leakcheck.Sysctl]
	}
	before := sysctls()
	f.setup("m1", tcp(21001, 80))
	f.setup("m2", tcp(21002, 80), network.PortMapping{HostPort: 21002, ContainerPort: 53, Protocol: "udp"})
	members, err := f.n.List()
	require.NoError(t, err)
	require.Equal(t, []string{"m1", "m2"}, members)
	require.Equal(t, "1", sysctls()["net.ipv4.ip_forward"])
	left, err := f.n.Leftovers(ctxOf(t), "m2")
	require.NoError(t, err)
	for _, kind := range []string{
		protocol.AbsentAddress, protocol.AbsentNetworkNamespace, protocol.AbsentPort,
		protocol.AbsentRule,
	} {
		require.Contains(t, strings.Join(left, "\n"), kind+" ")
	}
	require.NoError(t, f.n.Remove(ctxOf(t), "m1"))
	_, err = call(t, "", "127.0.0.1:21002", unreachable)
	require.ErrorContains(t, err, "refused", "the other is still published, nobody listens inside")
	require.NoError(t, f.n.Remove(ctxOf(t), "m2"))
	require.NoError(t, f.n.Remove(ctxOf(t), "m2"))
	left, err = f.n.Leftovers(ctxOf(t), "m2")
	require.NoError(t, err)
	require.Empty(t, left)
	require.Equal(t, before, sysctls())
	require.Empty(t, sh(t, "nft list tables"), "not even an empty table is left")
	// The leak check of the fixture covers the rest.
}

// An agent that was killed while it left has removed its bridge and restored nothing: the next one restores what the
// first found.
func TestWhatAKilledAgentLeftIsRestoredByTheNext(t *testing.T) {
	f := newFixture(t)
	before := forwarding(t)
	f.setup("m1")
	require.Equal(t, "1", forwarding(t))
	sh(t, "ip link del "+f.cfg.Bridge)
	other := *f
	other.n = nil
	other.cfg = f.config(filepath.Dir(f.cfg.StateDir))
	other.n = other.open()
	t.Cleanup(func() { require.NoError(t, other.n.Purge(ctxOf(t))) })
	other.setup("m2")
	require.NoError(t, other.n.Remove(ctxOf(t), "m2"))
	require.Equal(t, before, forwarding(t))
}

func forwarding(t *testing.T) string {
	t.Helper()
	return strings.TrimSpace(sh(t, "cat /proc/sys/net/ipv4/ip_forward"))
}

func TestOthersChainsAndForwardingStay(t *testing.T) {
	f := newFixture(t)
	sh(t, "iptables -w -t nat -N CNI-HOSTPORT-DNAT && iptables -w -t nat -A PREROUTING -m addrtype --dst-type LOCAL -j "+
		"CNI-HOSTPORT-DNAT && echo 1 > /proc/sys/net/ipv4/ip_forward")
	t.Cleanup(func() {
		sh(t, "iptables -w -t nat -F && iptables -w -t nat -X && nft delete table ip nat; echo 0 > "+
			"/proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/ipv4/conf/all/accept_redirects")
	})
	scope := leakcheck.Scope{Kinds: noticed(), Files: []string{t.TempDir()}}
	before, err := leakcheck.Take(scope)
	require.NoError(t, err)
	f.setup("m1", tcp(21001, 80))
	require.NoError(t, f.n.Remove(ctxOf(t), "m1"))
	after, err := leakcheck.Take(scope)
	require.NoError(t, err)
	require.Empty(t, leakcheck.Diff(before, after))
}

func TestTwoAgentsShareAndTheLastRestores(t *testing.T) {
	f := newFixture(t)
	other := *f
	other.n = nil
	other.cfg = f.config(filepath.Dir(f.cfg.StateDir))
	other.n = other.open()
	forwarding := func() string { return sh(t, "cat /proc/sys/net/ipv4/ip_forward") }
	require.Equal(t, "0", forwarding())
	f.setup("m1", tcp(21001, 8080))
	a := other.setup("m2", tcp(21002, 8080))
	require.NoError(t, f.n.Purge(ctxOf(t)))
	require.Equal(t, "1", forwarding(), "the other agent needs it")
	serve(t, a.NetNSPath, ":8080")
	_, err := call(t, "", "127.0.0.1:21002", reachable)
	require.NoError(t, err)
	require.NoError(t, other.n.Purge(ctxOf(t)))
	require.Equal(t, "0", forwarding())
	require.NoDirExists(t, f.cfg.SharedDir)
}
