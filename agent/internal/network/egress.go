package network

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/gpuaas/gpuaas/agent/policy"
)

// metadataAddresses answer with the machine's own credentials at many clouds: link-local, Azure, Alibaba, Oracle.
func metadataAddresses() []string {
	return []string{"169.254.0.0/16", "168.63.129.16/32", "100.100.100.200/32", "192.0.0.192/32"}
}

// privateNetworks are no addresses of the internet (IANA's registry of special-purpose addresses, RFC 6890).
func privateNetworks() []string {
	return []string{
		"0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.0.0.0/24", "192.168.0.0/16", "198.18.0.0/15",
		"224.0.0.0/4", "240.0.0.0/4",
	}
}

// smallestRoute skips routes that share the internet out to two or four links: they are no networks.
const smallestRoute = 8 // bits

// connected are the networks that this machine reaches without a router, but for the members' own. Their public
// addresses, too, are often trusted by what else is there.
func (n *Network) connected() ([]netip.Prefix, error) {
	routes, err := dumped(func() ([]netlink.Route, error) { return netlink.RouteList(nil, netlink.FAMILY_V4) })
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
	return found, nil
}

// egressRules are the rules for what a member sends out of this machine, in this order: what the owner names, the name
// servers, and then by mode.
func (n *Network) egressRules() (string, error) {
	egress := policy.Egress{}
	if n.cfg.Egress != nil {
		egress = n.cfg.Egress()
	}
	var rules []string
	for _, d := range egress.Allow {
		rules = append(rules, "ip daddr "+d.Prefix.String()+portMatch(d)+" accept")
	}
	if egress.Mode == policy.EgressNone {
		return lines(append(rules, "drop")), nil
	}
	// Spam from a tenant puts the owner's address on blocklists.
	rules = append(rules, "tcp dport 25 drop")
	if servers := n.resolvers(); len(servers) > 0 {
		rules = append(rules, "ip daddr "+setOf(servers)+" meta l4proto { tcp, udp } th dport 53 accept")
	}
	denied := parsed(metadataAddresses())
	if egress.Mode != policy.EgressAll {
		connected, err := n.connected()
		if err != nil {
			return "", err
		}
		denied = slices.Concat(denied, parsed(privateNetworks()), connected)
	}
	return lines(append(rules, "ip daddr "+setOf(denied)+" drop")), nil
}

func portMatch(d policy.Destination) string {
	if d.FirstPort == 0 {
		return ""
	}
	return fmt.Sprintf(" meta l4proto { tcp, udp } th dport %d-%d", d.FirstPort, d.LastPort)
}

// resolvers are the name servers that members are told.
func (n *Network) resolvers() []netip.Prefix {
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

func parsed(networks []string) []netip.Prefix {
	out := make([]netip.Prefix, 0, len(networks))
	for _, network := range networks {
		out = append(out, netip.MustParsePrefix(network))
	}
	return out
}

// setOf is an anonymous nftables set; such a set must not hold a network twice, or a part of one.
func setOf(networks []netip.Prefix) string {
	sorted := slices.Clone(networks)
	slices.SortFunc(sorted, func(a, b netip.Prefix) int {
		if c := a.Addr().Compare(b.Addr()); c != 0 {
			return c
		}
		return a.Bits() - b.Bits()
	})
	var distinct []string
	var last netip.Prefix
	for _, network := range sorted {
		if !last.IsValid() || !last.Overlaps(network) {
			distinct = append(distinct, network.String())
			last = network
		}
	}
	return "{ " + strings.Join(distinct, ", ") + " }"
}

func lines(rules []string) string { return strings.Join(rules, "\n\t\t") }
