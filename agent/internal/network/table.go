package network

import (
	"context"
	"fmt"
	"regexp"
	"strings"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// table is the name of this agent's own firewall table.
func (n *Network) table() string {
	return "gpuaas_" + strings.NewReplacer("-", "_", ".", "_").Replace(n.cfg.Bridge)
}

// portMap is the table's map from the published ports of a protocol to members.
func portMap(protocol string) string { return protocol + "_ports" }

// makeTable makes the firewall table, with the ports that are published already: the members outlive the agent, and whatever
// the table was, it is right afterwards, without a moment in between.
func (n *Network) makeTable(ctx context.Context) error {
	published, err := n.published(ctx)
	if err != nil {
		return err
	}
	if _, err := run(ctx, n.rules(published), "nft", "-f", "-"); err != nil {
		return fault.New(fault.Unavailable, "firewall_failed", "The node cannot make its firewall table: install nftables (apt-get install nftables).", err)
	}
	_, n.walls = n.listTable(ctx)
	return nil
}

// rules is the firewall table. It replaces itself, so that it is right whatever was there.
//
//   - from the node's own 127.0.0.1, and from nowhere else: to the members' published ports, with the bridge's address, because
//     an answer to 127.0.0.1 would not leave the member
//   - to a member: only answers, and what the node itself sends (published ports arrive that way). By direction, so that a
//     connection that was opened while someone had taken the walls away does not outlive that
//   - between members, of this agent or another: nothing (law 10)
//   - from a member to the host: nothing but answers
//   - from a member to 127.0.0.0/8 of the host (the kernel would let it pass because published ports need route_localnet) and
//     to link-local addresses, where clouds keep the host's own credentials: nothing
//   - from a member to elsewhere: everything, with the node's address
func (n *Network) rules(published string) string {
	return fmt.Sprintf(`table inet %[1]s
delete table inet %[1]s
table inet %[1]s {
	map %[4]s {
		type inet_service : ipv4_addr . inet_service
	}
	map %[5]s {
		type inet_service : ipv4_addr . inet_service
	}
	chain prerouting {
		type filter hook prerouting priority -300; policy accept;
		iifname "%[2]s" ip daddr { 127.0.0.0/8, 169.254.0.0/16 } drop
	}
	chain input {
		type filter hook input priority -10; policy accept;
		iifname "%[2]s" ct state established,related ct direction reply accept
		iifname "%[2]s" drop
	}
	chain forward {
		type filter hook forward priority -10; policy accept;
		oifname "%[2]s" ct state established,related ct direction reply accept
		oifname "%[2]s" drop
		iifname "%[2]s" ip saddr != %[3]s drop
		iifname "%[2]s" meta nfproto ipv6 drop
	}
	chain output {
		type nat hook output priority -100; policy accept;
		ip daddr `+publishedOn+` dnat ip to tcp dport map @%[4]s
		ip daddr `+publishedOn+` dnat ip to udp dport map @%[5]s
	}
	chain postrouting {
		type nat hook postrouting priority 100; policy accept;
		ip saddr 127.0.0.0/8 oifname "%[2]s" masquerade
		ip saddr %[3]s oifname != "%[2]s" masquerade
	}
}
`, n.table(), n.cfg.Bridge, n.cfg.CIDR, portMap("tcp"), portMap("udp")) + published
}

// elements names a member's ports in the table's maps; the comment says whose they are, to whoever looks at the machine.
func (n *Network) elements(memberID string, r record) string {
	var script strings.Builder
	for _, p := range r.Ports {
		fmt.Fprintf(&script, "add element inet %s %s { %d comment %q : %s . %d }\n", n.table(), portMap(p.Protocol), p.HostPort, memberID, r.IP, p.ContainerPort)
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

// portElement is one port in nft's listing of a map.
var portElement = regexp.MustCompile(`(\d+) comment "([^"]*)"`)
