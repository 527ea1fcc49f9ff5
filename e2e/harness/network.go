package harness

import (
	"fmt"
	"os"
	"os/exec"
	"strings"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
)

// network is a bridge in the test's own namespace with a host behind each of its ports. The test itself, and what it
// starts without a namespace, stands on the bridge as here.
type network struct {
	w      *Testbed
	prefix string
	names  []string
}

// NewNetwork makes the bridge and a network namespace for each name.
func (w *Testbed) NewNetwork(names ...string) *network {
	w.T.Helper()
	n := &network{w: w, prefix: fmt.Sprintf("gpx%03d", w.number), names: names}
	w.keepRunNetns()
	bridge := n.prefix + "br"
	n.ip("link", "add", bridge, "type", "bridge")
	w.T.Cleanup(func() { n.ip("link", "del", bridge) })
	n.ip("addr", "add", n.addressOf(1)+"/24", "dev", bridge)
	n.ip("link", "set", bridge, "up")
	for i, name := range n.names {
		ns, outside := n.prefix+name, fmt.Sprintf("%sv%d", n.prefix, i)
		n.ip("netns", "add", ns)
		w.T.Cleanup(func() { n.ip("netns", "del", ns) })
		n.ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", ns)
		// With its namespace it would go as well, but in the kernel's own time, which can be long on a loaded machine.
		w.T.Cleanup(func() { n.ip("link", "del", outside) })
		n.ip("link", "set", outside, "master", bridge, "up")
		n.ip("-n", ns, "addr", "add", n.addressOf(i+2)+"/24", "dev", "eth0")
		n.ip("-n", ns, "link", "set", "eth0", "up")
		n.ip("-n", ns, "link", "set", "lo", "up")
		n.ip("-n", ns, "route", "add", "default", "via", n.addressOf(1))
	}
	return n
}

// Behind adds a host that only one of the bridge's hosts has a way to, and returns its address.
func (n *network) Behind(host, name string, number int) (address string) {
	n.w.T.Helper()
	ns, router := n.prefix+name, n.prefix+host
	subnet := fmt.Sprintf("10.218.%d.", n.w.number)
	near, address := fmt.Sprintf("%s%d", subnet, number*4+1), fmt.Sprintf("%s%d", subnet, number*4+2)
	n.ip("netns", "add", ns)
	n.w.T.Cleanup(func() { n.ip("netns", "del", ns) })
	n.ip("-n", router, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", ns)
	n.w.T.Cleanup(func() { n.ip("-n", router, "link", "del", name) })
	n.ip("-n", router, "addr", "add", near+"/30", "dev", name)
	n.ip("-n", router, "link", "set", name, "up")
	n.ip("-n", ns, "addr", "add", address+"/30", "dev", "eth0")
	n.ip("-n", ns, "link", "set", "eth0", "up")
	n.ip("-n", ns, "link", "set", "lo", "up")
	n.ip("-n", ns, "route", "add", "default", "via", near)
	return address
}

func (n *network) addressOf(host int) string { return fmt.Sprintf("10.219.%d.%d", n.w.number, host) }

func (n *network) Address(name string) string {
	for i, have := range n.names {
		if have == name {
			return n.addressOf(i + 2)
		}
	}
	n.w.T.Fatalf("there is no host %q", name)
	return ""
}

func (n *network) Path(name string) string { return "/run/netns/" + n.prefix + name }

// HubConfigIn is a hub in the network's namespace for it, advertised as a remote operator would.
func (w *Testbed) HubConfigIn(n *network) devcluster.HubConfig {
	c := w.HubConfig()
	c.NetNS = n.Path("hub")
	c.Listen, c.SessionListen = n.Address("hub")+":8443", n.Address("hub")+":7843"
	c.AdvertiseAPI, c.AdvertiseSession = c.Listen, c.SessionListen
	return c
}

func (n *network) ip(args ...string) {
	n.w.T.Helper()
	out, err := exec.Command("ip", args...).CombinedOutput()
	require.NoError(n.w.T, err, "ip %s: %s", strings.Join(args, " "), out)
}

// keepRunNetns puts /run/netns back to what it was: iproute2 mounts it when the first namespace of a machine is named.
func (w *Testbed) keepRunNetns() {
	w.T.Helper()
	const dir = "/run/netns"
	before, err := os.ReadFile("/proc/self/mountinfo")
	require.NoError(w.T, err)
	if strings.Contains(string(before), " "+dir+" ") {
		return
	}
	_, err = os.Stat(dir)
	wasThere := err == nil
	w.T.Cleanup(func() {
		// Busy while another test names its own there, which then is the last.
		if unix.Unmount(dir, 0) == nil && !wasThere {
			require.NoError(w.T, os.Remove(dir))
		}
	})
}
