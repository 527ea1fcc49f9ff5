package network_test

import (
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/policy"
	"github.com/gpuaas/gpuaas/protocol"
)

// reaches tries all addresses at once and gives those that answer; reachable ones are awaited.
func reaches(t *testing.T, ns string, want, all []string) (answered []string) {
	t.Helper()
	var mu sync.Mutex
	var tries sync.WaitGroup
	for _, address := range all {
		within := unreachable
		for _, w := range want {
			if w == address {
				within = reachable
			}
		}
		tries.Go(func() {
			if _, err := call(t, ns, address, within); err == nil {
				mu.Lock()
				defer mu.Unlock()
				answered = append(answered, address)
			}
		})
	}
	tries.Wait()
	return answered
}

func TestMembersReachOutsideOnlyWhatTheOwnerAllows(t *testing.T) {
	f := newFixture(t)
	var owner atomic.Pointer[policy.Policy]
	owner.Store(&policy.Policy{})
	f.cfg.Egress = func() policy.Egress { return owner.Load().Egress }
	f.cfg.Resolvers = func() []netip.Addr {
		return []netip.Addr{netip.MustParseAddr(lanIP), netip.MustParseAddr("2001:db8::53")}
	}
	f.n = f.open()
	a := f.setup("m1")
	for _, port := range []string{":9000", ":9443", ":53", ":25"} {
		serve(t, f.outside, port)
	}
	internet := []string{outsideIP + ":9000", outsideIP + ":9443", outsideIP + ":53"}
	resolver, lan := lanIP+":53", []string{lanIP + ":9000", lanIP + ":9443", routerIP + ":9000"}
	metadata := []string{"169.254.169.254:9000", "168.63.129.16:9000", "100.100.100.200:9000"}
	mail := []string{outsideIP + ":25", lanIP + ":25"}
	var everything []string
	for _, part := range [][]string{internet, {resolver}, lan, metadata, mail} {
		everything = append(everything, part...)
	}
	for _, c := range []struct {
		doc  string
		want []string
	}{
		{"", append([]string{resolver}, internet...)},
		{"egress: internet", append([]string{resolver}, internet...)},
		{"egress: none", nil},
		{"egress: all", append(append([]string{resolver}, internet...), lan...)},
		{"egress: {allow: ['" + lanIP + ":9400-9500']}", append([]string{resolver, lanIP + ":9443"}, internet...)},
		{
			"egress: {mode: none, allow: ['" + routerIP + "', '169.254.169.254:9000', '" + lanIP + ":25']}",
			[]string{routerIP + ":9000", "169.254.169.254:9000", lanIP + ":25"},
		},
	} {
		p, err := policy.Parse([]byte(c.doc))
		require.NoError(t, err)
		owner.Store(&p)
		restored, err := f.n.EnsureRules(ctxOf(t))
		require.NoError(t, err)
		require.False(t, restored, "a new policy is no interference")
		require.ElementsMatch(t, c.want, reaches(t, a.NetNSPath, c.want, everything), c.doc)
	}
}

func TestWhatANewPolicyForbidsIsCut(t *testing.T) {
	f := newFixture(t)
	var egress atomic.Pointer[policy.Egress]
	egress.Store(&policy.Egress{Mode: policy.EgressAll})
	f.cfg.Egress = func() policy.Egress { return *egress.Load() }
	f.n = f.open()
	a := f.setup("m1")
	echo(t, f.outside, lanIP+":9000")
	c := opened(t, a.NetNSPath, lanIP+":9000", true)
	egress.Store(&policy.Egress{})
	_, err := f.n.EnsureRules(ctxOf(t))
	require.NoError(t, err)
	require.Error(t, echoes(c, unreachable))
}

// A network that the machine joins while members run is none of theirs, whatever its addresses.
func TestANetworkThatTheMachineJoinsIsClosedToMembers(t *testing.T) {
	f := newFixture(t)
	a := f.setup("m1")
	serve(t, f.outside, outsideIP+":9000")
	_, err := call(t, a.NetNSPath, outsideIP+":9000", reachable)
	require.NoError(t, err)
	sh(t, "ip addr add 198.51.100.2/24 dev up0")
	t.Cleanup(func() { sh(t, "ip addr del 198.51.100.2/24 dev up0") })
	restored, err := f.n.EnsureRules(ctxOf(t))
	require.NoError(t, err)
	require.False(t, restored)
	_, err = call(t, a.NetNSPath, outsideIP+":9000", unreachable)
	require.Error(t, err)
}

func TestMembersReachNothingByIPv6(t *testing.T) {
	f := newFixture(t)
	was := sh(t, "cat /proc/sys/net/ipv6/conf/all/forwarding")
	t.Cleanup(func() {
		sh(t, "ip -6 addr flush dev up0; echo 1 > /proc/sys/net/ipv6/conf/up0/disable_ipv6")
		sh(t, "echo "+was+" > /proc/sys/net/ipv6/conf/all/forwarding")
	})
	a := f.setup("m1")
	sh(t, `echo 0 > /proc/sys/net/ipv6/conf/up0/disable_ipv6 && echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
		ip -6 addr add 2001:db8:1::2/64 dev up0 nodad
		ip -6 addr add 2001:db8:2::1/64 dev `+f.cfg.Bridge+` nodad
		nsenter --net=`+f.outside+` sh -c 'ip -6 addr add 2001:db8:1::1/64 dev eth0 nodad
			ip -6 route add 2001:db8:2::/64 via 2001:db8:1::2'
		nsenter --net=`+a.NetNSPath+` sh -c 'ip -6 addr add 2001:db8:2::2/64 dev eth0 nodad
			ip -6 route add default via 2001:db8:2::1'`)
	serve6 := func(ns string) {
		var l net.Listener
		require.NoError(t, in(t, ns, func() (err error) { l, err = net.Listen("tcp6", "[::]:9006"); return err }))
		t.Cleanup(func() { _ = l.Close() })
	}
	dial6 := func(ns, address string, within time.Duration) error {
		return in(t, ns, func() error {
			c, err := net.DialTimeout("tcp6", address, within)
			if err == nil {
				_ = c.Close()
			}
			return err
		})
	}
	serve6(f.outside)
	serve6("")
	require.NoError(t, dial6("", "[2001:db8:1::1]:9006", reachable), "the host reaches it")
	require.Error(t, dial6(a.NetNSPath, "[2001:db8:1::1]:9006", unreachable))
	require.Error(t, dial6(a.NetNSPath, "[2001:db8:2::1]:9006", unreachable), "nor the host")
}

// TestTheMachineBecomesNoRouter is a machine with two networks that forwarded nothing before its first member came.
func TestTheMachineBecomesNoRouter(t *testing.T) {
	f := newFixture(t)
	second := filepath.Join(filepath.Dir(f.outside), "second")
	sh(t, `touch `+second+` && unshare --net=`+second+` ip link set lo up
		ip link add up1 type veth peer name eth0 && ip link set eth0 netns `+second+`
		ip addr add 203.0.113.2/24 dev up1 && ip link set up1 up
		nsenter --net=`+second+` sh -c 'ip addr add 203.0.113.1/24 dev eth0
			ip link set eth0 up && ip route add default via 203.0.113.2'
		nsenter --net=`+f.outside+` ip route add 203.0.113.0/24 via `+hostIP)
	t.Cleanup(func() { sh(t, "ip link del up1; umount "+second+"; rm "+second) })
	serve(t, second, ":9000")
	serve(t, f.outside, ":9000")
	f.setup("m1")
	_, err := call(t, f.outside, "203.0.113.1:9000", unreachable)
	require.Error(t, err)
	_, err = call(t, second, outsideIP+":9000", unreachable)
	require.Error(t, err)

	// What comes later belongs to a program that may count on forwarding, as Docker's bridge does.
	third := filepath.Join(filepath.Dir(f.outside), "third")
	sh(t, `touch `+third+` && unshare --net=`+third+` ip link set lo up
		ip link add up2 type veth peer name eth0 && ip link set eth0 netns `+third+`
		ip addr add 10.99.0.1/24 dev up2 && ip link set up2 up
		nsenter --net=`+third+` sh -c 'ip addr add 10.99.0.2/24 dev eth0
			ip link set eth0 up && ip route add default via 10.99.0.1'
		nsenter --net=`+f.outside+` ip route add 10.99.0.0/24 via `+hostIP)
	t.Cleanup(func() { sh(t, "ip link del up2; umount "+third+"; rm "+third) })
	_, err = f.n.EnsureRules(ctxOf(t))
	require.NoError(t, err)
	_, err = call(t, third, outsideIP+":9000", reachable)
	require.NoError(t, err)
}

// What a bridge of the machine passes between its own ports is no routing, also where the firewall sees it
// (br_netfilter).
func TestABridgeOfTheMachineGoesOnBridging(t *testing.T) {
	f := newFixture(t)
	base := filepath.Dir(f.outside)
	left, right := filepath.Join(base, "left"), filepath.Join(base, "right")
	sh(t,
		`ip link add own0 type bridge && ip link set own0 up; echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables || true`)
	t.Cleanup(func() { sh(t, "ip link del own0; umount "+left+" "+right+"; rm "+left+" "+right) })
	for i, name := range []string{left, right} {
		sh(t, fmt.Sprintf(`touch %[1]s && unshare --net=%[1]s ip link set lo up
			ip link add own%[2]d type veth peer name eth0 && ip link set eth0 netns %[1]s
			ip link set own%[2]d master own0 && ip link set own%[2]d up
			nsenter --net=%[1]s sh -c 'ip addr add 10.98.0.%[2]d/24 dev eth0; ip link set eth0 up'`, name, i+1))
	}
	serve(t, right, ":9000")
	_, err := call(t, left, "10.98.0.2:9000", reachable)
	require.NoError(t, err)
	f.setup("m1")
	_, err = call(t, left, "10.98.0.2:9000", reachable)
	require.NoError(t, err)
}

// A kernel without the parts of nftables that bound flows still isolates members, and the node says what is missing.
func TestWhatTheKernelCannotBoundIsReported(t *testing.T) {
	f := newFixture(t)
	for _, c := range []struct {
		noLimits, noTimeouts bool
		want                 []string
	}{
		{true, false, []string{protocol.ConditionNoFlowLimits}},
		{false, true, []string{protocol.ConditionNoFlowTimeouts}},
		{true, true, []string{protocol.ConditionNoFlowLimits, protocol.ConditionNoFlowTimeouts}},
		{false, false, nil},
	} {
		f.n = f.open()
		f.n.RefuseRules(c.noLimits, c.noTimeouts)
		require.Empty(t, f.n.Conditions())
		f.setup("m1")
		require.ElementsMatch(t, c.want, f.n.Conditions())
		require.NoError(t, f.n.Remove(ctxOf(t), "m1"))
	}
}
