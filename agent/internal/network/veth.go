package network

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/netnamespace"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
)

// memberLink is the name of the link inside.
const memberLink = "eth0"

// hostLink is the name of the other end, on the host. It derives from the attachment's id, so it needs no record; many
// programs ignore links called veth.
func (n *Network) hostLink(id string) string {
	sum := sha256.Sum256([]byte(n.cfg.Bridge + "\n" + id))
	return "veth" + hex.EncodeToString(sum[:])[:11]
}

// attachVeth connects the attachment's namespace to the bridge and sets its address and routes. No packet passes before
// the last step.
func (n *Network) attachVeth(id string, ip netip.Addr) error {
	bridge, err := n.bridge()
	if err != nil {
		return err
	}
	ns, err := netns.GetFromPath(n.netnsPath(id))
	if err != nil {
		return err
	}
	defer func() { _ = ns.Close() }()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.MasterIndex = n.hostLink(id), bridge.Attrs().MTU, bridge.Attrs().Index
	host := netlink.NewVeth(attrs)
	host.PeerName, host.PeerNamespace, host.PeerHardwareAddr = memberLink, netlink.NsFd(int(ns)), hardwareAddr(ip)
	if err := netlink.LinkAdd(host); err != nil {
		return fmt.Errorf("make the member's link: %w", err)
	}
	failpoint.Hit("agent/attach/veth_made")
	// By the alias, leftovers are found without a record.
	if err := netlink.LinkSetAlias(host, id); err != nil {
		return fmt.Errorf("name link %s: %w", attrs.Name, err)
	}
	// Isolated ports do not reach each other: neighbours are separated below IP, too.
	if err := netlink.LinkSetIsolated(host, true); err != nil {
		return fmt.Errorf("isolate link %s: %w", attrs.Name, err)
	}
	failpoint.Hit("agent/attach/veth_isolated")
	if err := netlink.LinkSetUp(host); err != nil {
		return fmt.Errorf("bring up link %s: %w", attrs.Name, err)
	}
	err = netnamespace.Run(n.netnsPath(id), func() error { return configureLink(hostNet(ip), hostNet(n.gateway())) })
	if err != nil {
		return err
	}
	return awaitForwarding(attrs.Name)
}

// hardwareAddr is a locally administered address that derives from the IP address: a neighbour with an old entry for
// the IP address reaches its next owner.
func hardwareAddr(ip netip.Addr) net.HardwareAddr {
	return append(net.HardwareAddr{0x02, 0x67}, ip.AsSlice()...)
}

func hostNet(ip netip.Addr) *net.IPNet {
	return &net.IPNet{IP: ip.AsSlice(), Mask: net.CIDRMask(32, 32)}
}

// configureLink runs in the attachment's namespace. It sets the loopback link and the member's link up, and lets the
// service's processes listen on ports below 1024. All packets take the way by the gateway, those to peers too: the
// bridge passes none between its ports, and the firewall decides.
func configureLink(address, gateway *net.IPNet) error {
	for name, value := range map[string]string{
		"ip_unprivileged_port_start": "0",
		// The host, which sends packets to a peer back by the link that they came by, would offer a shorter way.
		"conf/all/accept_redirects":                "0",
		"conf/" + memberLink + "/accept_redirects": "0",
	} {
		if err := os.WriteFile("/proc/sys/net/ipv4/"+name, []byte(value), 0); err != nil {
			return err
		}
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("bring up the loopback link: %w", err)
	}
	link, err := netlink.LinkByName(memberLink)
	if err != nil {
		return err
	}
	// No other link can have its link-local address. Without IPv6 the setting is missing.
	_ = os.WriteFile("/proc/sys/net/ipv6/conf/"+memberLink+"/accept_dad", []byte("0"), 0)
	if err := netlink.AddrAdd(link, &netlink.Addr{IPNet: address}); err != nil {
		return fmt.Errorf("give the member its address: %w", err)
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("bring up the member's link: %w", err)
	}
	for _, r := range []netlink.Route{{Dst: gateway, Scope: netlink.SCOPE_LINK}, {Gw: gateway.IP}} {
		r.LinkIndex = link.Attrs().Index
		if err := netlink.RouteAdd(&r); err != nil {
			return fmt.Errorf("give the member its routes: %w", err)
		}
	}
	return nil
}

// forwardingLimit bounds the pauses of awaitForwarding; their sum is about four seconds.
const forwardingLimit = 3 * time.Second

// awaitForwarding waits until the bridge forwards to the port: a packet that it drops is sent again only after a
// second. Since Linux 6.4 the query itself refreshes the state.
func awaitForwarding(name string) error {
	for pause := time.Millisecond; ; pause *= 2 {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		if link.Attrs().OperState == netlink.OperUp {
			return nil
		}
		if pause > forwardingLimit {
			return fmt.Errorf("link %s stays %s", name, link.Attrs().OperState)
		}
		time.Sleep(pause)
	}
}

// removeLink removes a link if it is there; the other end of a veth goes with it.
func removeLink(name string) error {
	link, err := netlink.LinkByName(name)
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing {
		return nil
	}
	if err != nil {
		return err
	}
	if err := netlink.LinkDel(link); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("remove link %s: %w", name, err)
	}
	return nil
}

// egressMTU is the MTU of the default route's link; members use the same, so that packets are not fragmented. It is
// 1500 where there is no default route.
func egressMTU() int {
	routes, _ := netnamespace.List(func() ([]netlink.Route, error) { return netlink.RouteList(nil, netlink.FAMILY_V4) })
	for _, r := range routes {
		if (r.Dst == nil || r.Dst.IP.IsUnspecified()) && r.LinkIndex > 0 {
			if link, err := netlink.LinkByIndex(r.LinkIndex); err == nil {
				return link.Attrs().MTU
			}
		}
	}
	return 1500
}
