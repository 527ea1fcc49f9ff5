package network_test

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/internal/network"
	"github.com/gpuaas/gpuaas/e2e/leakcheck"
	"github.com/gpuaas/gpuaas/e2e/skip"
)

// inside marks the second run of this program, in namespaces of its own.
const inside = "GPUAAS_NETWORK_TEST_INSIDE"

// TestMain runs the tests in a network namespace of their own, which plays the host: forwarding, firewall and links of
// the machine stay as they are, and other tests may run beside these. This is also how a second agent on one machine
// runs.
func TestMain(m *testing.M) {
	if os.Getenv(opensInotify) != "" {
		openInotify()
		os.Exit(0)
	}
	if os.Geteuid() != 0 {
		fmt.Println("skipped: making networks needs root")
		if os.Getenv(skip.RequireAll) != "" {
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Getenv(inside) == "" {
		self := exec.Command("/proc/self/exe", os.Args[1:]...)
		self.Env = append(os.Environ(), inside+"=1")
		self.Stdin, self.Stdout, self.Stderr = os.Stdin, os.Stdout, os.Stderr
		self.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS}
		if err := self.Run(); err != nil {
			fmt.Println("tests in their own namespaces:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	// A new network namespace begins with the machine's own setting.
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("0"), 0); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

var fixtures atomic.Int64

type fixture struct {
	t       *testing.T
	cfg     network.Config
	n       *network.Network
	outside string // network namespace of the world beyond the host
}

const (
	hostIP   = "192.0.2.2"
	routerIP = "192.0.2.1"
	// outsideIP stands for a public address, lanIP for one behind the router that is not; both are beyond the host's own
	// network.
	outsideIP = "198.51.100.1"
	lanIP     = "192.168.7.1"
)

func newFixture(t *testing.T) *fixture {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.Chmod(dir, 0o711))
	sh(t, "ip link set lo up")
	outside := filepath.Join(dir, "outside")
	sh(t, "touch "+outside+" && unshare --net="+outside+" ip link set lo up")
	t.Cleanup(func() { require.NoError(t, unix.Unmount(outside, unix.MNT_DETACH)) })
	sh(t,
		fmt.Sprintf(
			`ip link add up0 type veth peer name eth0 && echo 1 > /proc/sys/net/ipv6/conf/up0/disable_ipv6 && nsenter `+
				`--net=%[1]s true && ip link set eth0 netns %[1]s &&
		ip addr add %[2]s/24 dev up0 && ip link set up0 up && nsenter --net=%[1]s sh -c 'ip addr add %[3]s/24 dev eth0 `+
				`&& ip link set eth0 up' && ip route add default via %[3]s &&
		for a in %[4]s %[5]s 169.254.169.254 168.63.129.16 100.100.100.200; do nsenter --net=%[1]s ip addr add $a/32 dev `+
				`eth0; done`,
			outside, hostIP, routerIP, outsideIP, lanIP))
	t.Cleanup(func() { sh(t, "ip link del up0") })
	sh(t, "until ip -o link show up0 | grep -q 'state UP'; do sleep 0.01; done")
	leakcheck.Guard(t, leakcheck.Scope{Kinds: noticed(), Files: []string{dir}})
	leakcheck.Guard(t, leakcheck.Scope{Kinds: []leakcheck.Kind{leakcheck.Mount}, Contains: []string{dir}})
	f := &fixture{t: t, outside: outside}
	f.cfg = f.config(dir)
	f.n = f.open()
	t.Cleanup(func() { require.NoError(t, f.n.Purge(ctxOf(t))) })
	return f
}

// noticed is all that a network can leave; the machine's other processes come and go.
func noticed() []leakcheck.Kind {
	return []leakcheck.Kind{leakcheck.Link, leakcheck.Route, leakcheck.Firewall, leakcheck.Sysctl, leakcheck.File}
}

// config is the configuration of another agent on this host.
func (f *fixture) config(dir string) network.Config {
	i := fixtures.Add(1)
	return network.Config{
		Bridge: fmt.Sprintf("nt%d", i), CIDR: fmt.Sprintf("10.77.%d.0/24", i), StateDir: fmt.Sprintf("%s/agent%d", dir, i),
		SharedDir:  filepath.Join(dir, "shared"),
		UIDMapBase: 100000, UIDMapSize: 65536,
	}
}

func (f *fixture) open() *network.Network {
	f.t.Helper()
	if f.n != nil {
		f.n.Abandon() // the agent before has ended
	}
	n, err := network.Open(ctxOf(f.t), f.cfg)
	require.NoError(f.t, err)
	return n
}

func (f *fixture) setup(member string, ports ...network.PortMapping) network.Attachment {
	f.t.Helper()
	a, err := f.n.Setup(ctxOf(f.t), member, ports, nil)
	require.NoError(f.t, err)
	return a
}

func tcp(host, container uint16) network.PortMapping {
	return network.PortMapping{HostPort: host, ContainerPort: container, Protocol: "tcp"}
}

// in runs fn inside a network namespace; the empty path is the host.
func in(t *testing.T, path string, fn func() error) error {
	t.Helper()
	if path == "" {
		return fn()
	}
	runtime.LockOSThread()
	home, err := netns.GetFromPath("/proc/thread-self/ns/net")
	require.NoError(t, err)
	defer func() { _ = home.Close() }()
	ns, err := netns.GetFromPath(path)
	require.NoError(t, err)
	defer func() { _ = ns.Close() }()
	require.NoError(t, netns.Set(ns))
	defer func() {
		require.NoError(t, netns.Set(home))
		runtime.UnlockOSThread()
	}()
	return fn()
}

// serve answers every connection inside the namespace with the address that it came from.
func serve(t *testing.T, ns, address string) {
	t.Helper()
	listen(t, ns, address, func(c net.Conn) {
		host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
		_, _ = fmt.Fprint(c, host)
	})
}

// listen hands every connection inside the namespace to handle, and closes it after that.
func listen(t *testing.T, ns, address string, handle func(net.Conn)) {
	t.Helper()
	var l net.Listener
	require.NoError(t, in(t, ns, func() (err error) { l, err = net.Listen("tcp4", address); return err }))
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				handle(c)
				_ = c.Close()
			}()
		}
	}()
}

// call connects from inside the namespace and returns what serve answered.
func call(t *testing.T, ns, address string, within time.Duration) (string, error) {
	t.Helper()
	var answer string
	err := in(t, ns, func() error {
		c, err := net.DialTimeout("tcp4", address, within)
		if err != nil {
			return err
		}
		defer func() { _ = c.Close() }()
		buf := make([]byte, 64)
		n, err := c.Read(buf)
		answer = string(buf[:n])
		return err
	})
	return answer, err
}

// Reaching takes no longer than this; what is walled off is tried this long.
const (
	reachable   = 20 * time.Second
	unreachable = 700 * time.Millisecond
)

func TestMemberIsReachedOnLoopbackOnlyAndReachesOut(t *testing.T) {
	f := newFixture(t)
	a := f.setup("m1", tcp(21001, 8080))
	serve(t, a.NetNSPath, ":8080")
	serve(t, f.outside, ":9000")
	serve(t, "", ":9001")

	from, err := call(t, "", "127.0.0.1:21001", reachable)
	require.NoError(t, err)
	require.NotEqual(t, "127.0.0.1", from)

	from, err = call(t, a.NetNSPath, outsideIP+":9000", reachable)
	require.NoError(t, err, "a member reaches out")
	require.Equal(t, hostIP, from, "with the node's address")

	_, err = call(t, "", hostIP+":21001", unreachable)
	require.Error(t, err, "not published on the node's other addresses")
	_, err = call(t, f.outside, hostIP+":21001", unreachable)
	require.Error(t, err, "nor to the world")
	sh(t, "nsenter --net="+f.outside+" ip route add "+f.cfg.CIDR+" via "+hostIP)
	_, err = call(t, f.outside, a.IP+":8080", unreachable)
	require.Error(t, err, "nor by the member's own address")
	sh(t, "nsenter --net="+f.outside+" sh -c 'echo 1 > /proc/sys/net/ipv4/conf/eth0/route_localnet; ip route add "+
		"127.0.0.0/8 via "+hostIP+" table local; ip route del local 127.0.0.0/8 table local'")
	_, err = call(t, f.outside, "127.0.0.1:21001", unreachable)
	require.Error(t, err, "nor by a forged loopback address")

	gateway := strings.TrimSuffix(f.cfg.CIDR, "0/24") + "1"
	for _, host := range []string{gateway, hostIP} {
		_, err = call(t, a.NetNSPath, host+":9001", unreachable)
		require.Error(t, err, "a member does not reach the host's own services")
	}
	answer, err := call(t, "", hostIP+":9001", reachable)
	require.NoError(t, err, "which are there: "+answer)
}

func TestNeighboursDoNotMeet(t *testing.T) {
	f := newFixture(t)
	a, b := f.setup("m1", tcp(21001, 8080)), f.setup("m2", tcp(21002, 8080))
	other := *f
	other.n = nil
	other.cfg = f.config(filepath.Dir(f.cfg.StateDir))
	other.n = other.open()
	t.Cleanup(func() { require.NoError(t, other.n.Purge(ctxOf(t))) })
	c := other.setup("m3", tcp(21003, 8080))
	for _, m := range []network.Attachment{a, b, c} {
		serve(t, m.NetNSPath, ":8080")
	}
	for _, m := range []network.Attachment{a, b, c} {
		for _, n := range []network.Attachment{a, b, c} {
			within := unreachable
			if m == n {
				within = reachable
			}
			_, err := call(t, m.NetNSPath, n.IP+":8080", within)
			require.Equal(t, m == n, err == nil, "%s to %s: %v", m.IP, n.IP, err)
		}
	}
	// Not below IP either: no answer to who has that address, and no link-local IPv6.
	out, _ := exec.Command("nsenter", "--net="+a.NetNSPath, "ip", "neigh", "show", b.IP).CombinedOutput()
	require.NotContains(t, string(out), "lladdr")
	for port := range 3 {
		_, err := call(t, "", fmt.Sprintf("127.0.0.1:%d", 21001+port), reachable)
		require.NoError(t, err)
	}
}

func TestSetupIsRepeatable(t *testing.T) {
	f := newFixture(t)
	one := f.setup("m1", tcp(21001, 8080))
	serve(t, one.NetNSPath, ":8080")
	require.Equal(t, one, f.setup("m1", tcp(21001, 8080)))
	f.n = f.open() // the agent was restarted
	require.Equal(t, one, f.setup("m1", tcp(21001, 8080)))
	_, err := call(t, "", "127.0.0.1:21001", reachable)
	require.NoError(t, err)
	_, err = f.n.Setup(ctxOf(t), "m2", []network.PortMapping{tcp(21001, 80)}, nil)
	require.ErrorContains(t, err, "port_taken")
	f.setup("m1", tcp(21005, 8080))
	_, err = call(t, "", "127.0.0.1:21001", unreachable)
	require.Error(t, err, "the old port is closed")
}

func TestManyAtOnce(t *testing.T) {
	f := newFixture(t)
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			a, err := f.n.Setup(ctxOf(t), fmt.Sprintf("m%d", i), []network.PortMapping{tcp(uint16(21000+i), 8080)}, nil)
			if err != nil {
				t.Error(err)
				return
			}
			serve(t, a.NetNSPath, ":8080")
			if _, err := call(t, "", fmt.Sprintf("127.0.0.1:%d", 21000+i), reachable); err != nil {
				t.Error(err)
			}
			if i%2 == 0 {
				if err := f.n.Remove(ctxOf(t), fmt.Sprintf("m%d", i)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	members, err := f.n.List()
	require.NoError(t, err)
	require.Len(t, members, 6)
}

func TestBridgeThatSomebodyHasRemovedIsMadeAgain(t *testing.T) {
	f := newFixture(t)
	f.setup("m1")
	sh(t, "ip link del "+f.cfg.Bridge)
	serve(t, f.outside, ":9000")
	for _, member := range []string{"m2", "m1"} {
		_, err := call(t, f.setup(member).NetNSPath, outsideIP+":9000", reachable)
		require.NoError(t, err)
	}
}

func TestBadInputIsAClearError(t *testing.T) {
	f := newFixture(t)
	for _, ports := range [][]network.PortMapping{
		{tcp(0, 1)},
		{tcp(1, 0)},
		{{HostPort: 1, ContainerPort: 1, Protocol: "sctp"}},
		{tcp(5, 1), tcp(5, 2)},
	} {
		_, err := f.n.Setup(ctxOf(t), "m1", ports, nil)
		require.ErrorContains(t, err, "bad_network")
	}
	_, err := f.n.Setup(ctxOf(t), "../m1", nil, nil)
	require.ErrorContains(t, err, "bad_network")
	for want, change := range map[string]func(*network.Config){
		"bridge's name": func(c *network.Config) { c.Bridge = "a; drop" },
		"IPv4 network":  func(c *network.Config) { c.CIDR = "10.0.0.1/8" },
		"absolute":      func(c *network.Config) { c.StateDir = "x" },
	} {
		cfg := f.cfg
		change(&cfg)
		_, err := network.Open(ctxOf(t), cfg)
		require.ErrorContains(t, err, want)
	}
	f.cfg.CIDR = "192.0.2.0/24"
	_, err = f.open().Setup(ctxOf(t), "m1", nil, nil)
	require.ErrorContains(t, err, "network_overlaps")
}

func TestMemberWithoutPortsAndWithoutUserNamespace(t *testing.T) {
	f := newFixture(t)
	f.cfg.UIDMapSize = 0
	f.n = f.open()
	a := f.setup("m1")
	require.Empty(t, a.UserNSPath)
	serve(t, f.outside, ":9000")
	_, err := call(t, a.NetNSPath, outsideIP+":9000", reachable)
	require.NoError(t, err)
}

func BenchmarkSetupAndRemove(b *testing.B) {
	sh(b, "ip link set lo up")
	dir := b.TempDir()
	n, err := network.Open(b.Context(), network.Config{
		Bridge: "bench0", CIDR: "10.78.0.0/16", StateDir: dir + "/a",
		SharedDir: dir + "/s", UIDMapBase: 100000, UIDMapSize: 65536,
	})
	require.NoError(b, err)
	_, err = n.Setup(b.Context(), "first", nil, nil)
	require.NoError(b, err)
	var up, down time.Duration
	for i := 0; b.Loop(); i++ {
		start := time.Now()
		_, err := n.Setup(b.Context(), "m", []network.PortMapping{tcp(21001, 8080)}, nil)
		require.NoError(b, err)
		up += time.Since(start)
		start = time.Now()
		require.NoError(b, n.Remove(b.Context(), "m"))
		down += time.Since(start)
	}
	b.ReportMetric(float64(up.Milliseconds())/float64(b.N), "ms/setup")
	b.ReportMetric(float64(down.Milliseconds())/float64(b.N), "ms/remove")
	require.NoError(b, n.Purge(b.Context()))
}
