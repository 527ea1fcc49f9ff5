package network_test

import (
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/network"
)

func TestLaw10IsolationRulesThatAnAdministratorFlushesAreRestored(t *testing.T) {
	f := newFixture(t)
	a, b := f.setup("m1", tcp(21001, 8080)), f.setup("m2", tcp(21002, 8080))
	for _, m := range []network.Attachment{a, b} {
		serve(t, m.NetNSPath, ":8080")
	}
	serve(t, "", ":9001")
	serve(t, f.outside, ":9000")
	echo(t, "", ":9002")
	ensure := func() (restored bool) {
		restored, err := f.n.EnsureRules(ctxOf(t))
		require.NoError(t, err)
		return restored
	}
	whole := func(when string) {
		t.Helper()
		_, err := call(t, a.NetNSPath, hostIP+":9001", unreachable)
		require.Error(t, err, when+": a member does not reach the host")
		_, err = call(t, a.NetNSPath, outsideIP+":9000", reachable)
		require.NoError(t, err, when+": a member reaches out")
		for port := range 2 {
			_, err := call(t, "", fmt.Sprintf("127.0.0.1:%d", 21001+port), reachable)
			require.NoError(t, err, when+": published ports answer")
		}
		require.False(t, ensure(), when+": nothing is missing")
	}
	whole("before")
	table := "inet gpuaas_" + f.cfg.Bridge
	for name, c := range map[string]struct {
		script string
		// open says that a member reaches the host until the rules are restored.
		open bool
	}{
		"everything":  {"nft flush ruleset", true},
		"the table":   {"nft delete table " + table, true},
		"one chain":   {"nft flush chain " + table + " input", true},
		"a new rule":  {"nft insert rule " + table + " input accept", true},
		"dormant":     {"nft 'add table " + table + " { flags dormant; }'", true},
		"one port":    {"nft delete element " + table + " tcp_ports '{ 21002 }'", false},
		"a new chain": {"nft 'add chain " + table + " other { type filter hook input priority -20; policy drop; }'", false},
		"another's port": {"nft delete element " + table + " tcp_ports '{ 21002 }' && nft add element " + table +
			" tcp_ports '{ 21002 comment \"m2\" : " + a.IP + " . 8080 }'", false},
	} {
		sh(t, c.script)
		intruder := opened(t, a.NetNSPath, hostIP+":9002", c.open)
		require.True(t, ensure(), name)
		whole(name)
		if intruder != nil {
			require.Error(t, echoes(intruder, unreachable), name+": what was opened meanwhile is cut")
		}
	}
	// An agent that was restarted does not know what was there.
	sh(t, "nft flush ruleset")
	f.n = f.open()
	ensure()
	whole("after a restart")
	require.NoError(t, f.n.Remove(ctxOf(t), "m1"))
	require.NoError(t, f.n.Remove(ctxOf(t), "m2"))
	left, err := f.n.Leftovers(ctxOf(t), "m1")
	require.NoError(t, err)
	require.Empty(t, left)
	require.False(t, ensure(), "without members there are no rules")
	require.Empty(t, sh(t, "nft list tables"))
}

// echo gives back whatever it is sent.
func echo(t *testing.T, ns, address string) {
	t.Helper()
	listen(t, ns, address, func(c net.Conn) { _, _ = io.Copy(c, c) })
}

// opened is a connection from inside the namespace to an echo server, if one is asked for; it must work.
func opened(t *testing.T, ns, address string, wanted bool) net.Conn {
	t.Helper()
	if !wanted {
		return nil
	}
	var c net.Conn
	require.NoError(t, in(t, ns, func() (err error) { c, err = net.DialTimeout("tcp4", address, reachable); return err }))
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, echoes(c, reachable))
	return c
}

func echoes(c net.Conn, within time.Duration) error {
	if err := c.SetDeadline(time.Now().Add(within)); err != nil {
		return err
	}
	if _, err := c.Write([]byte("?")); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 1))
	return err
}
