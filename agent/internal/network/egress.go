package network

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"

	"github.com/gpuaas/gpuaas/agent/netnamespace"
	"github.com/gpuaas/gpuaas/agent/policy"
)

// metadataNetworks answer with the machine's own credentials at many clouds: link-local, Azure, Alibaba, Oracle.
func metadataNetworks() []netip.Prefix {
	return parsePrefixes("169.254.0.0/16", "168.63.129.16/32", "100.100.100.200/32", "192.0.0.192/32")
}

// privateNetworks are no addresses of the internet (IANA's registry of special-purpose addresses, RFC 6890).
func privateNetworks() []netip.Prefix {
	return parsePrefixes("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.0.0.0/24", "192.168.0.0/16",
		"198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4")
}

func parsePrefixes(networks ...string) []netip.Prefix {
	out := make([]netip.Prefix, 0, len(networks))
	for _, network := range networks {
		out = append(out, netip.MustParsePrefix(network))
	}
	return out
}

// smallestRoute skips routes that split the internet between two or four links: they are no networks.
const smallestRoute = 8 // bits

// connectedNetworks are the networks that this machine reaches without a router, except the members' own. Hosts there
// often trust even each other's public addresses.
func (n *Network) connectedNetworks() ([]netip.Prefix, error) {
	routes, err := netnamespace.List(func() ([]netlink.Route, error) { return netlink.RouteList(nil, netlink.FAMILY_V4) })
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	var found []netip.Prefix
	for _, r := range routes {
		if r.Dst == nil || len(r.Gw) > 0 || len(r.MultiPath) > 0 || r.Via != nil {
			continue
		}
		prefix, err := netip.ParsePrefix(r.Dst.String())
		if err == nil && prefix.Bits() >= smallestRoute && prefix != n.prefix {
			found = append(found, prefix)
		}
	}
	// The kernel lists routes in any order; the rules are compared.
	slices.SortFunc(found, netip.Prefix.Compare)
	return slices.Compact(found), nil
}

// resolverNetworks are the members' name servers.
func (n *Network) resolverNetworks() []netip.Prefix {
	if n.cfg.Resolvers == nil {
		return nil
	}
	var servers []netip.Prefix
	for _, addr := range n.cfg.Resolvers() {
		if addr.Is4() {
			servers = append(servers, netip.PrefixFrom(addr, addr.BitLen()))
		}
	}
	return servers
}

// egressRules filter what a member sends out of this machine: first by the owner's list, then the name servers, then by
// mode.
func egressRules(in rulesetInput) ([]rule, []constantSet) {
	var rules []rule
	for _, d := range in.egress.Allow {
		if d.FirstPort == 0 {
			rules = append(rules, join(destination(d.Prefix), accept()))
			continue
		}
		ports := portRange{d.FirstPort, d.LastPort}
		rules = append(rules, join(destination(d.Prefix), destinationPorts(tcp, ports), accept()),
			join(destination(d.Prefix), destinationPorts(udp, ports), accept()))
	}
	if in.egress.Mode == policy.EgressNone {
		return append(rules, drop()), nil
	}
	const smtp, dns = 25, 53
	// Spam from a tenant puts the owner's address on blocklists.
	rules = append(rules, join(destinationPorts(tcp, portRange{smtp, smtp}), drop()))
	for _, server := range in.resolvers {
		for _, p := range []transportProtocol{tcp, udp} {
			rules = append(rules, join(destination(server), destinationPorts(p, portRange{dns, dns}), accept()))
		}
	}
	denied := metadataNetworks()
	if in.egress.Mode != policy.EgressAll {
		denied = slices.Concat(denied, privateNetworks(), in.connected)
	}
	return append(rules, join(destinationIn(deniedSet), drop())), []constantSet{
		{name: deniedSet, key: nftables.TypeIPAddr, interval: true, elements: intervals(denied)},
	}
}
