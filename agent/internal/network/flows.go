package network

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/protocol"
)

// Bounds on the flows of one member, so that the machine's connection table has room for all others. With the timeouts
// below a member that tries to fill it has at most about 7,000 of the table's 262,144 entries (the kernel's default
// from 4 GB on).
const (
	// maxFlows are those that are open at the same time; less where the table is small.
	maxFlows = 4096
	// flowShare is the part of the connection table that one member's open flows may take: one in so many.
	flowShare = 64
	// flowsPerSecond and flowBurst bound new ones.
	flowsPerSecond = 100
	flowBurst      = 2000
	// lowestPort is where the ports of translated flows begin. They end below those that the host takes for its own
	// connections, if that leaves fewestPorts; so members never use up the host's.
	lowestPort  = 1024
	fewestPorts = 16384
)

// flowTimeouts are shorter than the kernel's for flows that are over or were never answered, in seconds: 120 and 10 for
// TCP that is over, 120 and 30 for what waits for a first answer.
const flowTimeouts = `ct timeout member_tcp {
		protocol tcp; l3proto ip
		policy = { syn_sent : 30, close : 5, time_wait : 10 }
	}
	ct timeout member_udp {
		protocol udp; l3proto ip
		policy = { unreplied : 15 }
	}`

// features is what the kernel's nftables can do about flows.
type features struct{ limits, timeouts bool }

// featureSets are tried from the first to the last.
func featureSets() []features {
	return []features{{limits: true, timeouts: true}, {limits: true}, {timeouts: true}, {}}
}

func (f features) conditions() []string {
	var c []string
	if !f.limits {
		c = append(c, protocol.ConditionNoFlowLimits)
	}
	if !f.timeouts {
		c = append(c, protocol.ConditionNoFlowTimeouts)
	}
	return c
}

// declarations are the table's objects that flowRules needs.
func (f features) declarations(members netip.Prefix) string {
	var d []string
	if f.timeouts {
		d = append(d, flowTimeouts)
	}
	if f.limits {
		size := 1 << (members.Addr().BitLen() - members.Bits())
		for _, set := range []string{"flows", "new_flows"} {
			d = append(d, fmt.Sprintf("set %s {\n\t\ttype ipv4_addr; flags dynamic; size %d;\n\t}", set, size))
		}
	}
	return strings.Join(d, "\n\t")
}

// flowRules bound the flows of each member, before it is looked where they go.
func (f features) flowRules() string {
	var rules []string
	if f.limits {
		rules = append(rules,
			fmt.Sprintf("ct state new add @new_flows { ip saddr limit rate over %d/second burst %d packets } drop",
				flowsPerSecond, flowBurst),
			fmt.Sprintf("ct state new add @flows { ip saddr ct count over %d } drop", openFlows()))
	}
	if f.timeouts {
		for _, protocol := range protocols() {
			rules = append(rules, fmt.Sprintf("ct state new ip protocol %[1]s ct timeout set \"member_%[1]s\"", protocol))
		}
	}
	return lines(rules)
}

// openFlows is how many flows of a member may be open.
func openFlows() int {
	text, err := readSysctl("net/netfilter/nf_conntrack_max")
	if err != nil {
		return maxFlows // the module is not loaded yet; the next look at the table knows
	}
	table, err := strconv.Atoi(text)
	if err != nil || table <= 0 {
		return maxFlows // 0 is no bound
	}
	return max(min(maxFlows, table/flowShare), 1)
}

// translatedPorts is the range for nftables' masquerade; empty where the host's own range leaves none.
func translatedPorts() string {
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		return ""
	}
	var first, last int
	if _, err := fmt.Sscan(string(text), &first, &last); err != nil || first-lowestPort < fewestPorts {
		return ""
	}
	return fmt.Sprintf(" to :%d-%d", lowestPort, first-1)
}

// What the kernel's connection table is asked (linux/netfilter/nfnetlink_conntrack.h) and the netlink library does not
// name.
const (
	getFlows   = unix.NFNL_SUBSYS_CTNETLINK<<8 | nl.IPCTNL_MSG_CT_GET
	deleteFlow = unix.NFNL_SUBSYS_CTNETLINK<<8 | nl.IPCTNL_MSG_CT_DELETE

	ctaFilter       = 25
	ctaFilterOrig   = 1
	ctaFilterReply  = 2
	ctaFilterSource = 1 // a flag: compare the source address
)

// forgetFlows removes the flows that a member has begun from the connection table: entries outlive it by up to five
// days, would fill the table, and would lead late answers to the next member with this address.
func forgetFlows(addr net.IP) error {
	flows, err := listFlows(addr)
	if err != nil {
		return fmt.Errorf("list the flows of %s: %w", addr, err)
	}
	for _, flow := range flows {
		forget := nl.NewNetlinkRequest(deleteFlow, unix.NLM_F_ACK)
		forget.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_INET, Version: nl.NFNETLINK_V0})
		forget.AddRawData(flow)
		if _, err := forget.Execute(unix.NETLINK_NETFILTER, 0); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("forget a flow of %s: %w", addr, err)
		}
	}
	return nil
}

// flowCounts names the set of the members' counted flows to the kernel.
func (n *Network) flowCounts() *nftables.Set {
	return &nftables.Set{Table: &nftables.Table{Family: nftables.TableFamilyINet, Name: n.table()}, Name: "flows"}
}

// countedFlows reports whether the table counts flows of the address, and whether the member may have begun any: the
// kernel goes through all of a large connection table in milliseconds, which a member that only answers need not cost.
func (n *Network) countedFlows(addr net.IP) (counted, begun bool, err error) {
	kernel, err := nftables.New()
	if err != nil {
		return false, false, err
	}
	elements, err := kernel.GetSetElements(n.flowCounts())
	// The library hands on the kernel's words, not its number.
	if err != nil && !strings.Contains(err.Error(), unix.ENOENT.Error()) {
		return false, false, fmt.Errorf("list the counts of flows: %w", err)
	}
	counted = slices.ContainsFunc(elements, func(e nftables.SetElement) bool { return addr.Equal(net.IP(e.Key)) })
	return counted, counted || n.remade.Load() || !n.counts.Load(), nil
}

// listFlows gives the attributes of all flows that the address has begun; kernels before 5.8 list all, of which others
// are left out here.
func listFlows(source net.IP) ([][]byte, error) {
	list := nl.NewNetlinkRequest(getFlows, unix.NLM_F_DUMP)
	list.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_INET, Version: nl.NFNETLINK_V0})
	match := nl.NewRtAttr(nl.CTA_TUPLE_ORIG|unix.NLA_F_NESTED, nil)
	match.AddRtAttr(nl.CTA_TUPLE_IP|unix.NLA_F_NESTED, nil).AddRtAttr(nl.CTA_IP_V4_SRC, source)
	list.AddData(match)
	filter := nl.NewRtAttr(ctaFilter|unix.NLA_F_NESTED, nil)
	filter.AddRtAttr(ctaFilterOrig, binary.NativeEndian.AppendUint32(nil, ctaFilterSource))
	filter.AddRtAttr(ctaFilterReply, make([]byte, 4))
	list.AddData(filter)
	answers, err := list.Execute(unix.NETLINK_NETFILTER, 0)
	if err != nil && !errors.Is(err, nl.ErrDumpInterrupted) {
		return nil, err
	}
	var flows [][]byte
	for _, m := range answers {
		if len(m) > nl.SizeofNfgenmsg && hasSource(m[nl.SizeofNfgenmsg:], source) {
			flows = append(flows, m[nl.SizeofNfgenmsg:])
		}
	}
	return flows, nil
}

// hasSource looks into a flow's attributes.
func hasSource(attributes []byte, source net.IP) bool {
	inside := attributes
	for _, path := range []int{nl.CTA_TUPLE_ORIG, nl.CTA_TUPLE_IP, nl.CTA_IP_V4_SRC} {
		attrs, err := nl.ParseRouteAttr(inside)
		if err != nil {
			return false
		}
		i := slices.IndexFunc(attrs, func(a syscall.NetlinkRouteAttr) bool {
			return int(a.Attr.Type&nl.NLA_TYPE_MASK) == path
		})
		if i < 0 {
			return false
		}
		inside = attrs[i].Value
	}
	return source.Equal(net.IP(inside))
}
