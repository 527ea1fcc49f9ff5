package network_test

import (
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/policy"
)

const linkLocalPort = ":9006"

// answers serves TCP on every address of a family in a namespace, and passes on what comes in by UDP.
func answers(t *testing.T, ns, family string, received chan<- string) {
	t.Helper()
	var l net.Listener
	var p net.PacketConn
	require.NoError(t, in(t, ns, func() (err error) {
		if l, err = net.Listen("tcp"+family, linkLocalPort); err != nil {
			return err
		}
		p, err = net.ListenPacket("udp"+family, linkLocalPort)
		return err
	}))
	t.Cleanup(func() { _, _ = l.Close(), p.Close() })
	go func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			_ = c.Close()
		}
	}()
	go func() {
		buffer := make([]byte, 100)
		for n, _, err := p.ReadFrom(buffer); err == nil; n, _, err = p.ReadFrom(buffer) {
			received <- string(buffer[:n])
		}
	}()
}

// connects reports whether TCP reaches an address from a namespace; before that it sends the address as a datagram.
func connects(t *testing.T, ns, family, address string, within time.Duration) bool {
	t.Helper()
	err := in(t, ns, func() error {
		if p, err := net.Dial("udp"+family, address+linkLocalPort); err == nil {
			_, _ = p.Write([]byte(address))
			_ = p.Close()
		}
		c, err := net.DialTimeout("tcp"+family, address+linkLocalPort, within)
		if err == nil {
			_ = c.Close()
		}
		return err
	})
	return err == nil
}

// The link-local and metadata addresses of both families answer: on the machine, beyond it and in a neighbour. No
// packet of a member reaches them, neither by TCP nor by UDP, also where the owner opens all networks.
func TestLaw10LinkLocalAndMetadataAddressesAreClosedForEachFamily(t *testing.T) {
	f := newFixture(t)
	f.cfg.Egress = func() policy.Egress { return policy.Egress{Mode: policy.EgressAll} }
	f.n = f.open()
	a, b := f.setup("m1"), f.setup("m2")
	was := sh(t, "cat /proc/sys/net/ipv6/conf/all/forwarding")
	t.Cleanup(func() {
		sh(t, "ip -6 addr flush dev up0; echo 1 > /proc/sys/net/ipv6/conf/up0/disable_ipv6")
		sh(t, "ip addr del 169.254.7.1/16 dev up0")
		sh(t, "echo "+was+" > /proc/sys/net/ipv6/conf/all/forwarding")
	})
	// Every way is open that an address needs; only the firewall is between.
	sh(t, fmt.Sprintf(`echo 0 > /proc/sys/net/ipv6/conf/up0/disable_ipv6 && echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
		echo 0 > /proc/sys/net/ipv6/conf/%[1]s/disable_ipv6
		ip addr add 169.254.7.1/16 dev up0
		ip -6 addr add 2001:db8:1::2/64 dev up0 nodad && ip -6 addr add fe80::2/64 dev up0 nodad
		ip -6 addr add 2001:db8:2::1/64 dev %[1]s nodad && ip -6 addr add fe80::a/64 dev %[1]s nodad
		nsenter --net=%[2]s sh -c 'ip addr add 169.254.7.2/16 dev eth0
			ip -6 addr add 2001:db8:1::1/64 dev eth0 nodad && ip -6 addr add fe80::1/64 dev eth0 nodad
			ip -6 addr add fd00:ec2::254/128 dev eth0 nodad && ip -6 route add 2001:db8:2::/64 via 2001:db8:1::2'
		ip -6 route add fd00:ec2::254/128 via 2001:db8:1::1`, f.cfg.Bridge, f.outside))
	for i, ns := range []string{a.NetNSPath, b.NetNSPath} {
		sh(t, fmt.Sprintf(`nsenter --net=%[1]s sh -c 'echo 0 > /proc/sys/net/ipv6/conf/eth0/disable_ipv6
			ip addr add 169.254.8.%[2]d/32 dev eth0 && ip -6 addr add 2001:db8:2::1%[2]d/64 dev eth0 nodad
			ip -6 addr add fe80::1%[2]d/64 dev eth0 nodad && ip -6 route add default via 2001:db8:2::1'`, ns, i+1))
	}
	received := map[string]chan string{"4": make(chan string, 100), "6": make(chan string, 100)}
	for family, datagrams := range received {
		for _, ns := range []string{"", f.outside, b.NetNSPath} {
			answers(t, ns, family, datagrams)
		}
	}
	for ns, addresses := range map[string]map[string][]string{
		"": {
			"4": {"169.254.169.254", "169.254.7.1", "169.254.7.2"},
			"6": {"[fd00:ec2::254]", "[2001:db8:1::1]", "[fe80::1%up0]", "[fe80::a%" + f.cfg.Bridge + "]"},
		},
		b.NetNSPath: {"4": {"169.254.8.2"}, "6": {"[2001:db8:2::12]", "[fe80::12%eth0]"}},
	} {
		for family, list := range addresses {
			for _, address := range list {
				require.True(t, connects(t, ns, family, address, reachable), "without a firewall between, %s answers", address)
				require.Equal(t, address, <-received[family])
			}
		}
	}
	fromMember := map[string][]string{
		"4": {"169.254.169.254", "169.254.7.1", "169.254.7.2", "169.254.8.2"},
		"6": {
			"[fd00:ec2::254]", "[2001:db8:1::1]", "[2001:db8:2::1]", "[2001:db8:2::12]", "[fe80::a%eth0]", "[fe80::12%eth0]",
			"[fe80::1%eth0]",
		},
	}
	var tries sync.WaitGroup
	for family, addresses := range fromMember {
		for _, address := range addresses {
			tries.Go(func() {
				if connects(t, a.NetNSPath, family, address, unreachable) {
					t.Errorf("a member reaches %s", address)
				}
			})
		}
	}
	tries.Wait()
	for family, datagrams := range received {
		require.Empty(t, datagrams, "datagrams of a member by IPv%s", family)
	}
}
