package network

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/policy"
)

// Names in the firewall table.
const (
	egressChain      = "egress"
	peerChain        = "peer"
	deniedSet        = "denied"
	earlierLinkSet   = "earlier_links"
	newFlowSet       = "new_flows"
	openFlowSet      = "flows"
	tcpTimeoutObject = "member_tcp"
	udpTimeoutObject = "member_udp"
)

// rule is one rule of a chain: what it matches, then its verdict.
type rule []expr.Any

// ruleChain is a chain with its rules. One without a base is only jumped to.
type ruleChain struct {
	name string
	base baseChain
	// rangeRules masquerade with a range of ports; they are the first of the chain.
	rangeRules []rule
	rules      []rule
}

func (c ruleChain) allRules() []rule { return slices.Concat(c.rangeRules, c.rules) }

// baseChain says where the kernel calls a chain.
type baseChain struct {
	kind     nftables.ChainType
	hook     nftables.ChainHook
	priority nftables.ChainPriority
}

func filter(hook *nftables.ChainHook, priority nftables.ChainPriority) baseChain {
	return baseChain{nftables.ChainTypeFilter, *hook, priority}
}

func nat(hook *nftables.ChainHook, priority nftables.ChainPriority) baseChain {
	return baseChain{nftables.ChainTypeNAT, *hook, priority}
}

// constantSet is a set that only the agent fills.
type constantSet struct {
	name     string
	key      nftables.SetDatatype
	interval bool
	elements []nftables.SetElement
}

// ruleset is the firewall table without published ports. It is generated from rulesetInput alone, so two of them can be
// compared with each other and with what the kernel has.
type ruleset struct {
	features features
	// flowSetSize is how many members the sets of counted flows have room for.
	flowSetSize uint32
	sets        []constantSet
	chains      []ruleChain
}

// rulesetInput is everything that the rules depend on.
type rulesetInput struct {
	bridge   string
	members  netip.Prefix
	features features
	egress   policy.Egress
	// resolvers are name servers that members reach wherever they are; connected are the networks of this machine.
	resolvers, connected []netip.Prefix
	// maxOpenFlows bounds the open flows of one member.
	maxOpenFlows uint32
	// natPorts are the ports that members' flows leave by; the zero value leaves the choice to the kernel.
	natPorts portRange
	// earlierLinks are the links of the machine that did not forward to each other before the agent turned that on.
	earlierLinks []string
}

type portRange struct{ first, last uint16 }

// generateRules makes the firewall table:
//
//   - from the node's own 127.0.0.1, and from nowhere else: to the members' published ports, with the bridge's address,
//     because an answer to 127.0.0.1 would not leave the member
//   - to a member: only answers, and what the node itself sends (published ports arrive that way). By direction, so
//     that a connection that was opened while the rules were missing does not outlive that
//   - between the services of a member: everything, bounded by flowRules
//   - between members, of this agent or another: nothing (law 10)
//   - from a member to the host: nothing but answers; not to 127.0.0.0/8 either, which the kernel would let pass
//     because published ports need route_localnet
//   - from a member to elsewhere: what egressRules says, by IPv4 only, with the node's address, bounded by flowRules
//   - between links of the machine that did not forward before the agent turned that on: nothing
func generateRules(in rulesetInput) ruleset {
	egress, denied := egressRules(in)
	links, linkSets := linkRules(in.earlierLinks)
	in.members = in.members.Masked()
	loopback := netip.MustParsePrefix("127.0.0.0/8")
	fromBridge, toBridge := inputLink(expr.CmpOpEq, in.bridge), outputLink(expr.CmpOpEq, in.bridge)
	outward := join(source(expr.CmpOpEq, in.members), outputLink(expr.CmpOpNeq, in.bridge))
	return ruleset{
		features:    in.features,
		flowSetSize: 1 << (in.members.Addr().BitLen() - in.members.Bits()),
		sets:        append(linkSets, denied...),
		chains: []ruleChain{
			{name: egressChain, rules: slices.Concat(
				[]rule{
					join(ipFamily(unix.NFPROTO_IPV6), drop()),
					join(source(expr.CmpOpNeq, in.members), drop()),
				},
				flowRules(in), egress,
			)},
			{name: peerChain, rules: append(flowRules(in), accept())},
			{name: "prerouting", base: filter(nftables.ChainHookPrerouting, -300), rules: []rule{
				join(fromBridge, destination(loopback), drop()),
			}},
			{name: "input", base: filter(nftables.ChainHookInput, -10), rules: []rule{
				join(fromBridge, answers(), accept()),
				join(fromBridge, drop()),
			}},
			{name: "forward", base: filter(nftables.ChainHookForward, -10), rules: append([]rule{
				join(toBridge, answers(), accept()),
				join(fromBridge, toBridge, betweenPeers(), jump(peerChain)),
				join(toBridge, drop()),
				join(fromBridge, jump(egressChain)),
			}, links...)},
			{name: "output", base: nat(nftables.ChainHookOutput, -100), rules: []rule{
				join(destination(publishedNet()), publishedPort(tcp)),
				join(destination(publishedNet()), publishedPort(udp)),
			}},
			{
				name: "postrouting", base: nat(nftables.ChainHookPostrouting, 100),
				rangeRules: rangeRules(outward, in.natPorts),
				rules: []rule{
					join(source(expr.CmpOpEq, loopback), toBridge, masquerade()),
					join(outward, masquerade()),
				},
			},
		},
	}
}

// rangeRules give members' flows a port of the range.
func rangeRules(outward rule, ports portRange) []rule {
	if ports == (portRange{}) {
		return nil
	}
	return []rule{
		join(outward, transport(tcp), masqueradeIn(ports)),
		join(outward, transport(udp), masqueradeIn(ports)),
	}
}

// linkRules keep the machine from forwarding between the links that it did not forward between. What comes in by a link
// may leave by the same: with br_netfilter the firewall sees what a bridge passes between its own ports, too.
func linkRules(links []string) ([]rule, []constantSet) {
	if len(links) < 2 {
		return nil, nil
	}
	set := constantSet{name: earlierLinkSet, key: nftables.TypeIFName}
	var rules []rule
	for _, link := range links {
		set.elements = append(set.elements, nftables.SetElement{Key: linkName(link)})
		rules = append(rules, join(inputLink(expr.CmpOpEq, link), outputLink(expr.CmpOpEq, link), accept()))
	}
	rules = append(rules, rule{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, &expr.Lookup{SourceRegister: 1, SetName: earlierLinkSet},
		&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1}, &expr.Lookup{SourceRegister: 1, SetName: earlierLinkSet},
		&expr.Verdict{Kind: expr.VerdictDrop},
	})
	return rules, []constantSet{set}
}

// flowRules bound the flows of each service before its egress is judged.
func flowRules(in rulesetInput) []rule {
	var rules []rule
	if in.features.limits {
		rules = append(rules,
			join(newFlow(), countBySource(newFlowSet, &expr.Limit{
				Type: expr.LimitTypePkts, Rate: flowsPerSecond, Unit: expr.LimitTimeSecond, Burst: flowBurst, Over: true,
			}), drop()),
			join(newFlow(), countBySource(openFlowSet, &expr.Connlimit{
				Count: in.maxOpenFlows, Flags: expr.NFT_CONNLIMIT_F_INV,
			}), drop()))
	}
	if in.features.timeouts {
		for _, t := range []struct {
			protocol transportProtocol
			object   string
		}{{tcp, tcpTimeoutObject}, {udp, udpTimeoutObject}} {
			rules = append(rules, join(newFlow(), ipFamily(unix.NFPROTO_IPV4), transport(t.protocol),
				rule{&expr.Objref{Type: unix.NFT_OBJECT_CT_TIMEOUT, Name: t.object}}))
		}
	}
	return rules
}

// intervals are the elements of an interval set. The kernel refuses intervals that overlap, so they are merged.
func intervals(networks []netip.Prefix) []nftables.SetElement {
	type span struct{ first, last uint32 }
	var spans []span
	for _, p := range networks {
		first := addressNumber(p.Masked().Addr())
		spans = append(spans, span{first, first | uint32(1<<(32-p.Bits())-1)})
	}
	slices.SortFunc(spans, func(a, b span) int { return int(int64(a.first) - int64(b.first)) })
	var merged []span
	for _, s := range spans {
		if n := len(merged); n > 0 && uint64(s.first) <= uint64(merged[n-1].last)+1 {
			merged[n-1].last = max(merged[n-1].last, s.last)
		} else {
			merged = append(merged, s)
		}
	}
	var elements []nftables.SetElement
	for _, s := range merged {
		elements = append(elements, nftables.SetElement{Key: binary.BigEndian.AppendUint32(nil, s.first)})
		if s.last != 1<<32-1 {
			elements = append(elements, nftables.SetElement{
				Key: binary.BigEndian.AppendUint32(nil, s.last+1), IntervalEnd: true,
			})
		}
	}
	return elements
}

func addressNumber(ip netip.Addr) uint32 {
	b := ip.As4()
	return binary.BigEndian.Uint32(b[:])
}
