package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/netnamespace"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// makeShared makes the shared network: the firewall table, the bridge, and forwarding between links. The isolation
// rules come first.
func (n *Network) makeShared(ctx context.Context) error {
	if err := n.makeDirs(); err != nil {
		return err
	}
	if err := n.checkOverlap(); err != nil {
		return err
	}
	if err := n.applyRules(); err != nil {
		return err
	}
	failpoint.Hit("agent/shared_network/rules_applied")
	if err := n.makeBridge(); err != nil {
		return err
	}
	failpoint.Hit("agent/shared_network/bridge_made")
	if err := n.allowForwarding(ctx); err != nil {
		return err
	}
	return n.withHostState(func(h *hostState) error {
		// The earlier settings are on disk before any is changed.
		if err := h.join(n.cfg.Bridge); err != nil {
			return err
		}
		failpoint.Hit("agent/shared_network/host_state_written")
		return writeSysctl(ipForward, "1")
	})
}

// bridge returns the members' link on the host. If another program has removed it, bridge makes it again, without
// ports.
func (n *Network) bridge() (netlink.Link, error) {
	link, err := netlink.LinkByName(n.cfg.Bridge)
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing {
		if err = n.makeBridge(); err == nil {
			link, err = netlink.LinkByName(n.cfg.Bridge)
		}
	}
	return link, err
}

// makeBridge makes the bridge, with the gateway's address.
func (n *Network) makeBridge() error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = n.cfg.Bridge, egressMTU()
	attrs.HardwareAddr = hardwareAddr(n.gateway()) // a bridge that is made anew keeps it: members know it by ARP
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil && !errors.Is(err, unix.EEXIST) {
		return fault.New(fault.Unavailable, codeNetworkFailed, "The node cannot make the bridge "+n.cfg.Bridge+
			": the bridge kernel module may be missing.", err)
	}
	link, err := netlink.LinkByName(n.cfg.Bridge)
	if err != nil {
		return err
	}
	if link.Type() != "bridge" {
		return fault.New(fault.Conflict, codeNetworkOverlaps, "The link "+n.cfg.Bridge+" is there already and is no "+
			"bridge: choose another name with --bridge.", nil)
	}
	// Published ports are dialled from 127.0.0.1; without route_localnet the kernel drops such packets on the bridge.
	if err := writeSysctl("net/ipv4/conf/"+n.cfg.Bridge+"/route_localnet", "1"); err != nil {
		return err
	}
	// The host takes no routes from members. Without IPv6 the setting is missing.
	if err := writeSysctl("net/ipv6/conf/"+n.cfg.Bridge+"/accept_ra", "0"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	// An address that is set explicitly stays; otherwise it changes with the bridge's ports.
	if err := netlink.LinkSetHardwareAddr(link, link.Attrs().HardwareAddr); err != nil {
		return fmt.Errorf("keep the bridge's hardware address: %w", err)
	}
	address := &net.IPNet{IP: n.gateway().AsSlice(), Mask: net.CIDRMask(n.prefix.Bits(), 32)}
	if err := netlink.AddrReplace(link, &netlink.Addr{IPNet: address}); err != nil {
		return fmt.Errorf("give the bridge its address: %w", err)
	}
	return netlink.LinkSetUp(link)
}

// ensureLinks restores what another program has changed of the bridge, of the members' links on it and of forwarding,
// such as `sysctl --system` or a network service of the host that was restarted.
func (n *Network) ensureLinks() error {
	n.use.RLock()
	defer n.use.RUnlock()
	members, err := n.List()
	if err != nil {
		return err
	}
	members = slices.DeleteFunc(members, func(id string) bool {
		r, err := n.readRecord(id)
		return err != nil || !r.Ready
	})
	if len(members) == 0 {
		return nil
	}
	if !n.hasGateway() {
		n.cfg.Log.Warn("another program changed this agent's bridge; it is restored", slog.String("bridge", n.cfg.Bridge))
		if err := n.makeBridge(); err != nil {
			return err
		}
	}
	bridge, err := netlink.LinkByName(n.cfg.Bridge)
	if err != nil {
		return err
	}
	for _, id := range members {
		link, err := netlink.LinkByName(n.hostLink(id))
		if err != nil || link.Attrs().MasterIndex == bridge.Attrs().Index && link.Attrs().Flags&net.FlagUp != 0 {
			continue // one that is gone is made anew with its container's next network
		}
		err = errors.Join(netlink.LinkSetMaster(link, bridge), netlink.LinkSetIsolated(link, true), netlink.LinkSetUp(link))
		if err != nil {
			return fmt.Errorf("connect link %s to the bridge: %w", link.Attrs().Name, err)
		}
	}
	return writeSysctl(ipForward, "1")
}

// hasGateway reports whether the bridge is there as makeBridge has left it.
func (n *Network) hasGateway() bool {
	link, err := netlink.LinkByName(n.cfg.Bridge)
	if err != nil || link.Attrs().Flags&net.FlagUp == 0 {
		return false
	}
	addrs, err := netnamespace.List(func() ([]netlink.Addr, error) { return netlink.AddrList(link, netlink.FAMILY_V4) })
	if err != nil || !slices.ContainsFunc(addrs, func(a netlink.Addr) bool { return a.IP.Equal(n.gateway().AsSlice()) }) {
		return false
	}
	localnet, err := readSysctl("net/ipv4/conf/" + n.cfg.Bridge + "/route_localnet")
	return err == nil && localnet == "1"
}

// checkOverlap refuses a network that overlaps with one that the machine uses already.
func (n *Network) checkOverlap() error {
	own, err := netlink.ParseIPNet(n.cfg.CIDR)
	if err != nil {
		return err
	}
	addrs, err := netnamespace.List(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_V4) })
	if err != nil {
		return fmt.Errorf("list addresses: %w", err)
	}
	ownIndex := 0
	if bridge, err := netlink.LinkByName(n.cfg.Bridge); err == nil {
		ownIndex = bridge.Attrs().Index
	}
	for _, a := range addrs {
		if a.LinkIndex != ownIndex && (own.Contains(a.IP) || a.Contains(own.IP)) {
			return fault.New(fault.Conflict, codeNetworkOverlaps, fmt.Sprintf("The members' network %s overlaps with %s, "+
				"which this machine uses: choose another with --pod-cidr.", n.cfg.CIDR, a.IPNet), nil)
		}
	}
	return nil
}

// removeShared removes the shared network. It finds everything by name, so it also works after a crash.
func (n *Network) removeShared(ctx context.Context) error {
	if err := removeLink(n.cfg.Bridge); err != nil {
		return err
	}
	failpoint.Hit("agent/shared_network_removal/bridge_removed")
	if err := n.removeForwardRules(ctx); err != nil {
		return err
	}
	if err := n.withHostState(func(h *hostState) error { return h.leave(n.cfg.Bridge) }); err != nil {
		return err
	}
	failpoint.Hit("agent/shared_network_removal/host_state_written")
	if err := n.removeTable(); err != nil {
		return err
	}
	n.applied = nil
	n.countsLost.Store(false)
	failpoint.Hit("agent/shared_network_removal/rules_removed")
	return n.removeLeases()
}
