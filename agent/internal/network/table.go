package network

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// table is the name of this agent's own firewall table.
func (n *Network) table() string {
	return "gpuaas_" + strings.NewReplacer("-", "_", ".", "_").Replace(n.cfg.Bridge)
}

// portMap is the table's map from the published ports of a protocol to members.
func portMap(protocol string) string { return protocol + "_ports" }

// makeTable makes the firewall table, with the ports that are published already: the members outlive the agent, and
// whatever the table was, it is right afterwards, without a moment in between. What the kernel cannot do about flows is
// left out and reported.
func (n *Network) makeTable(ctx context.Context) error {
	published, err := n.published(ctx)
	if err != nil {
		return err
	}
	if n.isolated, err = n.earlierLinks(); err != nil {
		return err
	}
	for _, n.features = range featureSets() {
		rules, e := n.rules()
		if e != nil {
			return e
		}
		if _, err = run(ctx, rules+published, "nft", "-f", "-"); err == nil {
			n.applied = rules
			break
		}
	}
	if err != nil {
		return fault.New(fault.Unavailable, "firewall_failed",
			"The node cannot make its firewall table: install nftables (apt-get install nftables).", err)
	}
	n.counts.Store(n.features.limits)
	if n.hasReady(ctx) {
		n.remade.Store(true)
	}
	n.lacks.Store(new(n.features.conditions()))
	_, n.walls = n.listTable(ctx)
	return nil
}

// earlierLinks are the links that were there when an agent turned forwarding on for its members. The machine was no
// router between those; links that came later belong to programs that may count on forwarding.
func (n *Network) earlierLinks() (links []string, err error) {
	err = n.agree(func(a *agreement) error {
		if err := a.join(n.cfg.Bridge); err != nil {
			return err
		}
		links = slices.DeleteFunc(a.Previous.links(), func(link string) bool { return slices.Contains(a.Users, link) })
		return nil
	})
	return links, err
}

// rules is the firewall table, without published ports. It replaces itself, so that it is right whatever was there.
//
//   - from the node's own 127.0.0.1, and from nowhere else: to the members' published ports, with the bridge's address,
//     because an answer to 127.0.0.1 would not leave the member
//   - to a member: only answers, and what the node itself sends (published ports arrive that way). By direction, so
//     that a connection that was opened while someone had taken the rules away does not outlive that
//   - between members, of this agent or another: nothing (law 10)
//   - from a member to the host: nothing but answers; not to 127.0.0.0/8 either, which the kernel would let pass
//     because published ports need route_localnet
//   - from a member to elsewhere: what egressRules says, by IPv4 only, with the node's address, bounded by flowRules
//   - between links of the machine that did not forward before the agent turned that on: nothing
func (n *Network) rules() (string, error) {
	egress, err := n.egressRules()
	if err != nil {
		return "", err
	}
	return strings.NewReplacer(
		"{TABLE}", "inet "+n.table(),
		"{BRIDGE}", strconv.Quote(n.cfg.Bridge),
		"{MEMBERS}", n.cfg.CIDR,
		"{LOOPBACK}", publishedOn,
		"{DECLARATIONS}", n.features.declarations(n.prefix),
		"{FLOWS}", n.features.flowRules(),
		"{EGRESS}", egress,
		"{EARLIER_LINKS}", n.isolationRules(),
		"{PORTS}", translatedPorts(),
	).Replace(tableTemplate), nil
}

const tableTemplate = `table {TABLE}
delete table {TABLE}
table {TABLE} {
	{DECLARATIONS}
	map tcp_ports {
		type inet_service : ipv4_addr . inet_service
	}
	map udp_ports {
		type inet_service : ipv4_addr . inet_service
	}
	chain prerouting {
		type filter hook prerouting priority -300; policy accept;
		iifname {BRIDGE} ip daddr 127.0.0.0/8 drop
	}
	chain input {
		type filter hook input priority -10; policy accept;
		iifname {BRIDGE} ct state established,related ct direction reply accept
		iifname {BRIDGE} drop
	}
	chain egress {
		meta nfproto ipv6 drop
		ip saddr != {MEMBERS} drop
		{FLOWS}
		{EGRESS}
	}
	chain forward {
		type filter hook forward priority -10; policy accept;
		oifname {BRIDGE} ct state established,related ct direction reply accept
		oifname {BRIDGE} drop
		iifname {BRIDGE} jump egress
		{EARLIER_LINKS}
	}
	chain output {
		type nat hook output priority -100; policy accept;
		ip daddr {LOOPBACK} dnat ip to tcp dport map @tcp_ports
		ip daddr {LOOPBACK} dnat ip to udp dport map @udp_ports
	}
	chain postrouting {
		type nat hook postrouting priority 100; policy accept;
		ip saddr 127.0.0.0/8 oifname {BRIDGE} masquerade
		ip saddr {MEMBERS} oifname != {BRIDGE} meta l4proto { tcp, udp } masquerade{PORTS}
		ip saddr {MEMBERS} oifname != {BRIDGE} masquerade
	}
}
`

// isolationRules keep the machine from being a router between the links that it was none between. What comes in by a
// link may leave by the same: with br_netfilter the firewall sees what a bridge passes between its own ports, too.
func (n *Network) isolationRules() string {
	var rules strings.Builder
	for i, link := range n.isolated {
		var others []string
		for k, other := range n.isolated {
			if k != i {
				others = append(others, strconv.Quote(other))
			}
		}
		if len(others) > 0 {
			fmt.Fprintf(&rules, "iifname %q oifname { %s } drop\n\t\t", link, strings.Join(others, ", "))
		}
	}
	return rules.String()
}

// elements names a member's ports in the table's maps; the comment says whose they are, to whoever looks at the
// machine.
func (n *Network) elements(memberID string, r record) string {
	var script strings.Builder
	for _, p := range r.Ports {
		fmt.Fprintf(&script, "add element inet %s %s { %d comment %q : %s . %d }\n",
			n.table(), portMap(p.Protocol), p.HostPort, memberID, r.IP, p.ContainerPort)
	}
	return script.String()
}

// published is the ports of all members whose networks are ready.
func (n *Network) published(ctx context.Context) (string, error) {
	members, err := n.List(ctx)
	if err != nil {
		return "", err
	}
	var script strings.Builder
	for _, id := range members {
		if r, err := n.readRecord(id); err == nil && r.Ready {
			script.WriteString(n.elements(id, r))
		}
	}
	return script.String(), nil
}

// hasReady says whether a member's network is ready.
func (n *Network) hasReady(ctx context.Context) bool {
	members, err := n.List(ctx)
	return err != nil || slices.ContainsFunc(members, func(id string) bool {
		r, err := n.readRecord(id)
		return err == nil && r.Ready
	})
}

// portElement is one port in nft's listing of a map.
var portElement = regexp.MustCompile(`(\d+) comment "([^"]*)"`)
