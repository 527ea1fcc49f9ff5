package network

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"syscall"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/protocol"
)

// Bounds on the flows of one member, so that the machine's connection table has room for all others. With the timeouts
// below, a member has at most about 7,000 of the table's 262,144 entries (the kernel's default from 4 GB on).
const (
	// maxFlows bounds the flows that are open at the same time; less where the table is small.
	maxFlows = 4096
	// flowShare is the part of the connection table that one member's open flows may take: one in so many.
	flowShare = 64
	// flowsPerSecond and flowBurst bound new ones.
	flowsPerSecond = 100
	flowBurst      = 2000
	// lowestPort is the first port of translated flows. The last one is below the host's range for its own connections,
	// if that leaves fewestPorts, so that members never use up the host's ports.
	lowestPort  = 1024
	fewestPorts = 16384
)

// addFlowTimeouts adds the timeouts of members' flows. The kernel's own are longer for flows that are over or were
// never answered: 120 and 10 seconds for TCP that is over, 120 and 30 for a flow that waits for its first answer.
func addFlowTimeouts(kernel *nftables.Conn, table *nftables.Table) {
	for name, timeout := range map[string]*expr.CtTimeout{
		tcpTimeoutObject: {L3Proto: unix.NFPROTO_IPV4, L4Proto: unix.IPPROTO_TCP, Policy: expr.CtStatePolicyTimeout{
			expr.CtStateTCPSYNSENT: 30, expr.CtStateTCPCLOSE: 5, expr.CtStateTCPTIMEWAIT: 10,
		}},
		udpTimeoutObject: {L3Proto: unix.NFPROTO_IPV4, L4Proto: unix.IPPROTO_UDP, Policy: expr.CtStatePolicyTimeout{
			expr.CtStateUDPUNREPLIED: 15,
		}},
	} {
		kernel.AddObj(&nftables.NamedObj{Table: table, Name: name, Type: nftables.ObjTypeCtTimeout, Obj: timeout})
	}
}

// features are the parts of the kernel's nftables that bound flows.
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

// flowSet names one of the sets in which the table counts flows by member.
func (n *Network) flowSet(name string) *nftables.Set {
	return &nftables.Set{Table: n.table(), Name: name, KeyType: nftables.TypeIPAddr}
}

// openFlowLimit is how many flows of a member may be open.
func openFlowLimit() uint32 {
	size, err := readSysctl("net/netfilter/nf_conntrack_max")
	if err != nil {
		return maxFlows // the module is not loaded yet; the next check of the table knows
	}
	return shareOf(size)
}

// shareOf is what one member may have of a connection table of this size.
func shareOf(size string) uint32 {
	table, err := strconv.Atoi(size)
	if err != nil || table <= 0 {
		return maxFlows // 0 is no bound
	}
	return uint32(max(min(maxFlows, table/flowShare), 1))
}

// natPorts is the range that translated flows leave by; empty where the host's own range leaves none.
func natPorts() portRange {
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		return portRange{}
	}
	var first, last int
	if _, err := fmt.Sscan(string(text), &first, &last); err != nil || first-lowestPort < fewestPorts {
		return portRange{}
	}
	return portRange{lowestPort, uint16(first - 1)}
}

// Messages and attributes of the kernel's connection table (linux/netfilter/nfnetlink_conntrack.h) that the netlink
// library does not name.
const (
	getFlows   = unix.NFNL_SUBSYS_CTNETLINK<<8 | nl.IPCTNL_MSG_CT_GET
	deleteFlow = unix.NFNL_SUBSYS_CTNETLINK<<8 | nl.IPCTNL_MSG_CT_DELETE

	ctaFilter       = 25
	ctaFilterOrig   = 1
	ctaFilterReply  = 2
	ctaFilterSource = 1 // a flag: compare the source address
)

// deleteFlows removes the flows of an address from the connection table: entries outlive it by up to five days and
// would fill the table. Those that a member has begun would lead late answers to the next member with the address;
// those that its peers have begun would let what the next member sends through to the peers, as answers.
func deleteFlows(addr net.IP) error {
	begun, err := listFlows(addr, nl.CTA_TUPLE_ORIG)
	if err != nil {
		return fmt.Errorf("list the flows of %s: %w", addr, err)
	}
	reached, err := listFlows(addr, nl.CTA_TUPLE_REPLY)
	if err != nil {
		return fmt.Errorf("list the flows to %s: %w", addr, err)
	}
	for _, flow := range slices.Concat(begun, reached) {
		request := nl.NewNetlinkRequest(deleteFlow, unix.NLM_F_ACK)
		request.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_INET, Version: nl.NFNETLINK_V0})
		request.AddRawData(flow)
		if _, err := request.Execute(unix.NETLINK_NETFILTER, 0); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("delete a flow of %s: %w", addr, err)
		}
	}
	return nil
}

// listFlows returns the attributes of all flows that the address has begun (side is CTA_TUPLE_ORIG), or that reached it
// (CTA_TUPLE_REPLY). The kernel filters: the library's
// ConntrackDeleteFilters parses the whole table, which takes 80 MB and more than a second for 200,000 entries. Kernels
// before 5.8 ignore the filter and list all.
func listFlows(source net.IP, side int) ([][]byte, error) {
	list := nl.NewNetlinkRequest(getFlows, unix.NLM_F_DUMP)
	list.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_INET, Version: nl.NFNETLINK_V0})
	match := nl.NewRtAttr(side|unix.NLA_F_NESTED, nil)
	match.AddRtAttr(nl.CTA_TUPLE_IP|unix.NLA_F_NESTED, nil).AddRtAttr(nl.CTA_IP_V4_SRC, source)
	list.AddData(match)
	filter := nl.NewRtAttr(ctaFilter|unix.NLA_F_NESTED, nil)
	for flags, of := range map[int]int{ctaFilterOrig: nl.CTA_TUPLE_ORIG, ctaFilterReply: nl.CTA_TUPLE_REPLY} {
		compared := make([]byte, 4)
		if of == side {
			binary.NativeEndian.PutUint32(compared, ctaFilterSource)
		}
		filter.AddRtAttr(flags, compared)
	}
	list.AddData(filter)
	answers, err := list.Execute(unix.NETLINK_NETFILTER, 0)
	if err != nil && !errors.Is(err, nl.ErrDumpInterrupted) { // other members' flows change meanwhile
		return nil, err
	}
	var flows [][]byte
	for _, m := range answers {
		if len(m) > nl.SizeofNfgenmsg && hasSource(m[nl.SizeofNfgenmsg:], source, side) {
			flows = append(flows, m[nl.SizeofNfgenmsg:])
		}
	}
	return flows, nil
}

// hasSource reports whether the address has this part in a flow with these attributes.
func hasSource(attributes []byte, source net.IP, side int) bool {
	return source.Equal(net.IP(attributeAt(attributes, side, nl.CTA_TUPLE_IP, nl.CTA_IP_V4_SRC)))
}

// attributeAt is the value of a nested attribute; nil where there is none.
func attributeAt(attributes []byte, path ...int) []byte {
	inside := attributes
	for _, step := range path {
		attrs, err := nl.ParseRouteAttr(inside)
		if err != nil {
			return nil
		}
		i := slices.IndexFunc(attrs, func(a syscall.NetlinkRouteAttr) bool {
			return int(a.Attr.Type&nl.NLA_TYPE_MASK) == step
		})
		if i < 0 {
			return nil
		}
		inside = attrs[i].Value
	}
	return inside
}

// tcpIsOpen reports whether a flow is a TCP connection between SYN_SENT (1) and CLOSE_WAIT (5), in the kernel's order
// of states (linux/netfilter/nf_conntrack_tcp.h): at most one side has closed it.
func tcpIsOpen(attributes []byte) bool {
	state := attributeAt(attributes, nl.CTA_PROTOINFO, nl.CTA_PROTOINFO_TCP, nl.CTA_PROTOINFO_TCP_STATE)
	const synSent, closeWait = 1, 5
	return len(state) > 0 && state[0] >= synSent && state[0] <= closeWait
}

// countedFlows returns the address if the table counts flows of it, and whether the member may have begun any: for a
// member that has not, the connection table need not be searched.
func (n *Network) countedFlows(addr net.IP) (counted net.IP, begun bool, err error) {
	kernel, err := nftables.New()
	if err != nil {
		return nil, false, err
	}
	elements, err := kernel.GetSetElements(n.flowSet(openFlowSet))
	if err != nil && !isMissing(err) {
		return nil, false, fmt.Errorf("list the counts of flows: %w", err)
	}
	if slices.ContainsFunc(elements, func(e nftables.SetElement) bool { return addr.Equal(net.IP(e.Key)) }) {
		return addr, true, nil
	}
	return nil, n.countsLost.Load() || !n.countsFlows.Load(), nil
}
