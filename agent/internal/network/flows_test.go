package network_test

import (
	"fmt"
	"net"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// flows is how many entries the host's connection table has.
func flows(t *testing.T) int {
	t.Helper()
	n, err := strconv.Atoi(sh(t, "cat /proc/sys/net/netfilter/nf_conntrack_count"))
	require.NoError(t, err)
	return n
}

// openMany sends a packet to as many ports of the address.
func openMany(t *testing.T, ns, address string, count int) {
	t.Helper()
	require.NoError(t, in(t, ns, func() error {
		c, err := net.ListenPacket("udp4", ":0")
		if err != nil {
			return err
		}
		defer func() { _ = c.Close() }()
		for port := range count {
			// A packet that the host drops is no error of the sender's.
			_, _ = c.WriteTo([]byte("?"), &net.UDPAddr{IP: net.ParseIP(address), Port: 10000 + port})
		}
		return nil
	}))
}

// openFlows opens ten flows, and waits until the kernel has them: the first packets wait for a link address.
func openFlows(t *testing.T, ns, from, to string) {
	t.Helper()
	const count = 10
	openMany(t, ns, to, count)
	require.Eventually(t, func() bool {
		table, err := os.ReadFile("/proc/net/nf_conntrack")
		return err == nil && strings.Count(string(table), "src="+from+" dst="+to+" ") >= count
	}, time.Minute, time.Millisecond)
}

func TestAMembersFlowsLeaveRoomForTheHosts(t *testing.T) {
	const maxFlows = 4096
	f := newFixture(t)
	a, b := f.setup("m1"), f.setup("m2")
	before := flows(t)
	openFlows(t, a.NetNSPath, a.IP, outsideIP)
	openMany(t, a.NetNSPath, outsideIP, 10_000)
	atOnce := flows(t) - before
	require.Positive(t, atOnce, "it has opened some")
	require.Less(t, atOnce, maxFlows, "new ones are bounded")
	for range 3 {
		sh(t, "nft flush set inet gpuaas_"+f.cfg.Bridge+" new_flows") // as if time had passed
		openMany(t, a.NetNSPath, outsideIP, 10_000)
	}
	require.Greater(t, flows(t)-before, atOnce)
	// The kernel may leave out of its count a flow that another processor is about to confirm (nf_conncount.c).
	require.LessOrEqual(t, flows(t)-before, maxFlows+runtime.NumCPU(), "so are those that are open")
	serve(t, f.outside, ":9000")
	_, err := call(t, "", outsideIP+":9000", reachable)
	require.NoError(t, err, "the host's own connections go on")
	_, err = call(t, b.NetNSPath, outsideIP+":9000", reachable)
	require.NoError(t, err, "and the neighbour's")
	require.NoError(t, f.n.Remove(ctxOf(t), "m1"))
	require.NotContains(t, sh(t, "cat /proc/net/nf_conntrack"), "src="+a.IP+" ", "what was open goes with the member")
	require.Contains(t, sh(t, "cat /proc/net/nf_conntrack"), "src="+b.IP+" ", "and nobody else's")
}

// fillTable adds flows of one address of the outside to the host's connection table.
func fillTable(t *testing.T, count int) {
	t.Helper()
	netfilter, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
	require.NoError(t, err)
	defer netfilter.Close()
	client, server := net.IPv4(203, 0, 113, 7).To4(), net.IPv4(203, 0, 113, 8).To4()
	for port := range uint16(count) {
		require.NoError(t, netfilter.ConntrackCreate(netlink.ConntrackTable, unix.AF_INET, &netlink.ConntrackFlow{
			FamilyType: unix.AF_INET, TimeOut: 600,
			Forward: netlink.IPTuple{SrcIP: client, SrcPort: 1 + port, DstIP: server, DstPort: 9, Protocol: unix.IPPROTO_UDP},
			Reverse: netlink.IPTuple{SrcIP: server, SrcPort: 9, DstIP: client, DstPort: 1 + port, Protocol: unix.IPPROTO_UDP},
		}))
	}
}

// The kernel filters since Linux 5.8; the agent would otherwise need hundreds of megabytes for a busy host's table.
func TestRemovingAMemberReadsOnlyItsOwnFlows(t *testing.T) {
	const others = 20_000
	f := newFixture(t)
	a := f.setup("m1")
	openFlows(t, a.NetNSPath, a.IP, outsideIP)
	fillTable(t, others)
	require.GreaterOrEqual(t, flows(t), others)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	require.NoError(t, f.n.Remove(ctxOf(t), "m1"))
	runtime.ReadMemStats(&after)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(4<<20), "a parsed entry takes 900 bytes")
	require.NotContains(t, sh(t, "cat /proc/net/nf_conntrack"), "src="+a.IP+" ")
	require.GreaterOrEqual(t, flows(t), others, "the others stay")
}

// The counts of flows go with the table; which members have any is not known then.
func TestFlowsGoWithTheirMemberAlsoAfterTheTableWasMadeAgain(t *testing.T) {
	f := newFixture(t)
	for name, does := range map[string]func(){
		"by the same agent":  func() { sh(t, "nft flush ruleset") },
		"by the next agent":  func() { f.n = f.open() },
		"and nothing before": func() {},
	} {
		f.setup("stays")
		a := f.setup("m1")
		openFlows(t, a.NetNSPath, a.IP, outsideIP)
		does()
		_, err := f.n.EnsureRules(ctxOf(t))
		require.NoError(t, err)
		require.NoError(t, f.n.Remove(ctxOf(t), "m1"))
		require.NotContains(t, sh(t, "cat /proc/net/nf_conntrack"), "src="+a.IP+" ", name)
	}
}

// A kill of the agent during the removal of the only member leaves flows that the next agent's table does not count.
func TestFlowsGoWithAMemberWhoseRemovalWasInterrupted(t *testing.T) {
	f := newFixture(t)
	a := f.setup("m1")
	openFlows(t, a.NetNSPath, a.IP, outsideIP)
	sh(t, `sed -i 's/"ready":true/"ready":false/' `+f.cfg.StateDir+"/members/m1.json")
	f.n = f.open()
	_, err := f.n.EnsureRules(ctxOf(t))
	require.NoError(t, err)
	require.NoError(t, f.n.Remove(ctxOf(t), "m1"))
	require.NotContains(t, sh(t, "cat /proc/net/nf_conntrack"), "src="+a.IP+" ")
}

// The host's ephemeral ports are its own: members' flows leave by others.
func TestMembersTakeNoneOfTheHostsPorts(t *testing.T) {
	f := newFixture(t)
	a := f.setup("m1")
	var first, last int
	_, err := fmt.Sscan(sh(t, "cat /proc/sys/net/ipv4/ip_local_port_range"), &first, &last)
	require.NoError(t, err)
	listen(t, f.outside, ":9000", func(c net.Conn) { _, _ = fmt.Fprint(c, c.RemoteAddr()) })
	for range 20 {
		from, err := call(t, a.NetNSPath, outsideIP+":9000", reachable)
		require.NoError(t, err)
		port, err := strconv.Atoi(from[strings.LastIndex(from, ":")+1:])
		require.NoError(t, err)
		require.Less(t, port, first)
		require.GreaterOrEqual(t, port, 1024)
	}
}
