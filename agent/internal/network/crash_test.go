package network_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/network"
)

// TestCrashBetweenAnyTwoStepsIsMadeGood leaves what a kill -9 in the middle would leave.
func TestCrashBetweenAnyTwoStepsIsMadeGood(t *testing.T) {
	f := newFixture(t)
	ns := func(kind string) string { return f.cfg.StateDir + "/ns/m1." + kind }
	halves := map[string]string{
		"record only":          "true",
		"namespace files only": "umount " + ns("net") + " " + ns("user"),
		"namespace is gone":    "umount " + ns("net") + "; rm -f " + ns("net"),
		"host link is gone": "ip link del $(ip -o link show type veth master " + f.cfg.Bridge +
			" | head -1 | sed 's/^[0-9]*: \\([^@]*\\).*/\\1/')",
		"bridge is gone":    "ip link del " + f.cfg.Bridge,
		"no open port":      "nft flush map inet gpuaas_" + f.cfg.Bridge + " tcp_ports",
		"no firewall table": "nft delete table inet gpuaas_" + f.cfg.Bridge,
		"no address store":  "rm " + f.cfg.StateDir + "/addresses.json",
	}
	for name, halve := range halves {
		for _, then := range []string{"setup", "remove"} {
			t.Run(name+" then "+then, func(t *testing.T) {
				f.setup("m1", tcp(21001, 8080))
				sh(t, halve)
				require.NoError(t, os.WriteFile(f.cfg.StateDir+"/members/m1.json", unready(t, f.cfg.StateDir+"/members/m1.json"),
					0o600))
				f.n = f.open()
				if then == "setup" {
					a := f.setup("m1", tcp(21001, 8080))
					serve(t, a.NetNSPath, ":8080")
					_, err := call(t, "", "127.0.0.1:21001", reachable)
					require.NoError(t, err)
				}
				require.NoError(t, f.n.Remove(ctxOf(t), "m1"))
				left, err := f.n.Leftovers(ctxOf(t), "m1")
				require.NoError(t, err)
				require.Empty(t, left)
				// ip complains of named namespaces that others are just removing.
				require.Empty(t, sh(t, "ip -o link show type veth 2>/dev/null | grep -v up0 || true"))
				require.Empty(t, sh(t, "nft list tables"))
			})
		}
	}
}

// unready is a record as it is before the network is ready.
func unready(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	var r map[string]any
	require.NoError(t, json.Unmarshal(data, &r))
	r["ready"] = false
	delete(r, "ip")
	data, err = json.Marshal(r)
	require.NoError(t, err)
	return data
}

// A kill may come, and the disk may be full, before the first record of a member has its name.
func TestARecordThatWasNotFinishedIsNoLeftover(t *testing.T) {
	f := newFixture(t)
	record := f.cfg.StateDir + "/members/m1@main.json"
	require.NoError(t, os.WriteFile(record+".new", []byte("{"), 0o600))
	f.n = f.open()
	left, err := f.n.Leftovers(ctxOf(t), "m1")
	require.NoError(t, err)
	require.Empty(t, left, "of an agent that was killed")

	require.NoError(t, os.MkdirAll(record+"/taken", 0o700), "so that it cannot be replaced")
	require.Error(t, network.WriteJSON(record, "content"))
	require.NoError(t, os.RemoveAll(record))
	left, err = f.n.Leftovers(ctxOf(t), "m1")
	require.NoError(t, err)
	require.Empty(t, left, "of a write that failed")
}

func TestWhatAnEarlierBootLeftIsForgotten(t *testing.T) {
	f := newFixture(t)
	f.setup("m1", tcp(21001, 8080))
	// The machine goes down: the kernel's state is gone, the files are there.
	sh(t, "umount "+f.cfg.StateDir+"/ns/*; ip link del "+f.cfg.Bridge+"; nft flush ruleset; echo 0 > "+
		"/proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/ipv4/conf/all/accept_redirects")
	require.NoError(t, os.WriteFile(f.cfg.StateDir+"/boot", []byte("another-boot\n"), 0o600))
	shared, err := filepath.Glob(f.cfg.SharedDir + "/netns-*.json")
	require.NoError(t, err)
	data, err := os.ReadFile(shared[0])
	require.NoError(t, err)
	boot := sh(t, "cat /proc/sys/kernel/random/boot_id")
	require.NoError(t, os.WriteFile(shared[0], []byte(strings.ReplaceAll(string(data), boot, "another-boot")), 0o600))
	f.n = f.open()
	members, err := f.n.List()
	require.NoError(t, err)
	require.Empty(t, members)
	left, err := f.n.Leftovers(ctxOf(t), "m1")
	require.NoError(t, err)
	require.Empty(t, left)
	a := f.setup("m1", tcp(21001, 8080))
	require.True(t, strings.HasSuffix(a.IP, ".2"), "addresses of the earlier boot are free: "+a.IP)
}
