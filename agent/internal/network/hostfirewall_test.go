package network_test

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/network"
)

// TestMembersReachOutWhereTheHostForwardsNothing is a host with Docker or ufw.
func TestMembersReachOutWhereTheHostForwardsNothing(t *testing.T) {
	f := newFixture(t)
	sh(t, "iptables -w -P FORWARD DROP")
	t.Cleanup(func() { sh(t, "iptables -w -P FORWARD ACCEPT && iptables -w -X; nft delete table ip filter") })
	serve(t, f.outside, ":9000")
	before := sh(t, "iptables-save -t filter | grep -v '^#'")
	a := f.setup("m1", tcp(21001, 8080))
	_, err := call(t, a.NetNSPath, outsideIP+":9000", reachable)
	require.NoError(t, err)
	b := f.setup("m2", tcp(21002, 8080))
	serve(t, b.NetNSPath, ":8080")
	_, err = call(t, a.NetNSPath, b.IP+":8080", unreachable)
	require.Error(t, err, "neighbours do not meet all the same")
	f.n = f.open()
	f.setup("m2", tcp(21002, 8080))
	sh(t, "iptables -w -S FORWARD | grep gpuaas | sed 's/^/iptables -w /' | sh") // as a restored firewall adds them again
	require.NoError(t, f.n.Remove(ctxOf(t), "m1"))
	require.NoError(t, f.n.Remove(ctxOf(t), "m2"))
	strip := func(s string) string { return regexp.MustCompile(`\[\d+:\d+\]`).ReplaceAllString(s, "") }
	require.Equal(t, strip(before), strip(sh(t, "iptables-save -t filter | grep -v '^#'")))
}

// The host's firewall may be held by another program when the agent makes its rules again.
func TestMembersReachOutOnceTheHostsFirewallAnswersAgain(t *testing.T) {
	f := newFixture(t)
	sh(t, "iptables -w -P FORWARD DROP")
	t.Cleanup(func() { sh(t, "iptables -w -P FORWARD ACCEPT && iptables -w -X; nft delete table ip filter") })
	serve(t, f.outside, ":9000")
	a := f.setup("m1", tcp(21001, 8080))
	sh(t, "iptables -w -F FORWARD && nft delete table inet gpuaas_"+f.cfg.Bridge)
	program := filepath.Join(t.TempDir(), "iptables")
	require.NoError(t, os.WriteFile(program, []byte("#!/bin/sh\nexit 4\n"), 0o700))
	t.Setenv("PATH", filepath.Dir(program)+":"+os.Getenv("PATH"))
	_, err := f.n.EnsureRules(ctxOf(t))
	require.ErrorContains(t, err, "iptables")
	_, err = call(t, a.NetNSPath, outsideIP+":9000", unreachable)
	require.Error(t, err)

	require.NoError(t, os.Remove(program))
	_, err = f.n.EnsureRules(ctxOf(t))
	require.NoError(t, err)
	_, err = call(t, a.NetNSPath, outsideIP+":9000", reachable)
	require.NoError(t, err)
	require.NoError(t, f.n.Remove(ctxOf(t), "m1"))
}

// Docker may be started, and a firewall reloaded, long after the first member was.
func TestMembersReachOutAfterAnotherProgramChangedTheHostsFirewall(t *testing.T) {
	f := newFixture(t)
	serve(t, f.outside, ":9000")
	a := f.setup("m1", tcp(21001, 8080))
	t.Cleanup(func() { sh(t, "iptables -w -P FORWARD ACCEPT && iptables -w -X; nft delete table ip filter") })
	for _, change := range []string{"iptables -w -P FORWARD DROP", "iptables -w -F FORWARD"} {
		restored, err := f.n.EnsureRules(ctxOf(t))
		require.NoError(t, err)
		require.False(t, restored)
		sh(t, change)
		_, err = f.n.EnsureRules(ctxOf(t))
		require.NoError(t, err)
		_, err = call(t, a.NetNSPath, outsideIP+":9000", reachable)
		require.NoError(t, err, change)
	}
	require.NoError(t, f.n.Remove(ctxOf(t), "m1"))
	require.NotContains(t, sh(t, "iptables -w -S FORWARD"), "gpuaas")
}

// A host's settings may be applied again at any time, as its packages are upgraded.
func TestMembersReachOutAfterAnotherProgramChangedTheHostsLinks(t *testing.T) {
	f := newFixture(t)
	serve(t, f.outside, ":9000")
	a, b := f.setup("m1", tcp(21001, 8080)), f.setup("m2")
	for _, m := range []network.Attachment{a, b} {
		serve(t, m.NetNSPath, ":8080")
	}
	links := "$(ip -o link show master " + f.cfg.Bridge + " | sed 's/.*\\(veth[0-9a-f]*\\).*/\\1/')"
	for _, change := range []string{
		"echo 0 > /proc/sys/net/ipv4/ip_forward",
		"echo 0 > /proc/sys/net/ipv4/conf/" + f.cfg.Bridge + "/route_localnet",
		"ip addr flush dev " + f.cfg.Bridge,
		"ip link set " + f.cfg.Bridge + " down",
		"for l in " + links + "; do ip link set $l nomaster; done",
		"for l in " + links + "; do ip link set $l down; done",
		"ip link del " + f.cfg.Bridge,
	} {
		sh(t, change)
		_, err := f.n.EnsureRules(ctxOf(t))
		require.NoError(t, err, change)
		_, err = call(t, a.NetNSPath, outsideIP+":9000", reachable)
		require.NoError(t, err, change)
		_, err = call(t, "", "127.0.0.1:21001", reachable)
		require.NoError(t, err, change)
		_, err = call(t, a.NetNSPath, b.IP+":8080", unreachable)
		require.Error(t, err, change+": neighbours do not meet all the same")
	}
}
