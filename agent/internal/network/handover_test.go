package network_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	cni "github.com/containerd/go-cni"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// plugins makes networks as the release of 2026-11-20 did: by CNI, with this configuration. What it did about ports is
// not in it.
func (f *fixture) plugins() cni.CNI {
	conf := map[string]any{
		"cniVersion": "1.0.0", "name": f.cfg.Bridge, "plugins": []map[string]any{{
			"type": "bridge", "bridge": f.cfg.Bridge, "isGateway": true, "ipMasq": false, "hairpinMode": false, "mtu": 1500,
			"ipam": map[string]any{
				"type": "host-local", "dataDir": f.cfg.StateDir + "/ipam",
				"ranges": [][]map[string]any{{{"subnet": f.cfg.CIDR}}}, "routes": []map[string]any{{"dst": "0.0.0.0/0"}},
			},
		}},
	}
	data, err := json.Marshal(conf)
	require.NoError(f.t, err)
	plugins, err := cni.New(cni.WithPluginDir([]string{"/usr/lib/cni", "/opt/cni/bin"}), cni.WithInterfacePrefix("eth"),
		cni.WithConfListBytes(data))
	require.NoError(f.t, err)
	return plugins
}

// plugged is a member whose network that release has made; its address.
func (f *fixture) plugged(plugins cni.CNI, member string) (ip string) {
	f.t.Helper()
	ns := filepath.Join(f.cfg.StateDir, "ns", member+".net")
	sh(f.t, fmt.Sprintf("touch %[1]s && unshare --net=%[1]s true", ns))
	f.t.Cleanup(func() { _ = unix.Unmount(ns, unix.MNT_DETACH) })
	result, err := plugins.SetupSerially(ctxOf(f.t), member, ns)
	require.NoError(f.t, err)
	ip = result.Interfaces["eth0"].IPConfigs[0].IP.String()
	record := map[string]any{
		"boot_id": sh(f.t, "cat /proc/sys/kernel/random/boot_id"), "ready": true, "ports": nil,
		"ip": ip,
	}
	for name, link := range result.Interfaces {
		if link.Sandbox == "" && name != f.cfg.Bridge {
			sh(f.t, "bridge link set dev "+name+" isolated on")
			record["host_link"] = name
		}
	}
	data, err := json.Marshal(record)
	require.NoError(f.t, err)
	require.NoError(f.t, os.WriteFile(f.cfg.StateDir+"/members/"+member+".json", data, 0o600))
	return ip
}

func TestReleasesTakeOverFromEachOther(t *testing.T) {
	f := newFixture(t)
	f.cfg.UIDMapSize = 0
	plugins := f.plugins()
	f.n = f.open()
	f.setup("first")
	given := map[string]string{
		"before": f.plugged(plugins, "before"), "halfway": f.plugged(plugins, "halfway"),
		"stays": f.plugged(plugins, "stays"),
	}
	halfway := f.cfg.StateDir + "/members/halfway.json"
	require.NoError(t, os.WriteFile(halfway, unready(t, halfway), 0o600))

	// The upgrade: what is there stays and goes like what is new.
	f.n = f.open()
	before, after := f.setup("before"), f.setup("after")
	require.Equal(t, given["before"], before.IP, "recognised")
	serve(t, before.NetNSPath, ":8080")
	serve(t, f.outside, ":9000")
	_, err := call(t, before.NetNSPath, outsideIP+":9000", reachable)
	require.NoError(t, err)
	_, err = call(t, after.NetNSPath, before.IP+":8080", unreachable)
	require.Error(t, err, "neighbours of two releases do not meet")
	given["after"] = after.IP
	// or the kernel would remove what is forgotten
	held, err := os.Open(filepath.Join(f.cfg.StateDir, "ns", "halfway.net"))
	require.NoError(t, err)
	defer func() { _ = held.Close() }()
	for _, member := range []string{"before", "halfway"} {
		require.NoError(t, f.n.Remove(ctxOf(t), member))
		left, err := f.n.Leftovers(ctxOf(t), member)
		require.NoError(t, err)
		require.Empty(t, left)
	}

	require.Equal(t, "3", sh(t, "ip -o link show master "+f.cfg.Bridge+" | wc -l"), "links of first, stays and after")

	// And back: that release gives no address twice, and removes what this one has made.
	given["again"] = f.plugged(plugins, "again")
	seen := map[string]string{}
	for member, ip := range given {
		require.Empty(t, seen[ip], "%s and %s have the same address %s", member, seen[ip], ip)
		seen[ip] = member
	}
	require.NoError(t, plugins.Remove(ctxOf(t), "after", after.NetNSPath))
	left, err := f.n.Leftovers(ctxOf(t), "after")
	require.NoError(t, err)
	require.Len(t, left, 2, "only the namespace and the record, which are not the plugins' business: %v", left)
}
