package network

import (
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"reflect"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// EnsureRules replaces the firewall table if another program has changed it, which it reports (`nft flush ruleset`
// removes the isolation of members, law 10), or if the owner's policy, the name servers or the machine's networks have
// changed. It restores links and forwarding as well. Without members it does nothing.
func (n *Network) EnsureRules(ctx context.Context) (restored bool, err error) {
	restored, err = n.ensureTable(ctx)
	return restored, errors.Join(err, n.ensureLinks())
}

func (n *Network) ensureTable(ctx context.Context) (restored bool, err error) {
	members, err := n.List()
	if err != nil || len(members) == 0 {
		return false, err
	}
	if err := n.reserveAllPorts(ctx, members); err != nil {
		n.cfg.Log.WarnContext(ctx, "a published port cannot be reserved; connections to it reach a member",
			slog.Any("error", err))
	}
	n.use.RLock()
	state, err := n.checkRules(ctx, members)
	if err == nil && state == rulesIntact {
		err = n.keepForwarding(ctx)
	}
	n.use.RUnlock()
	if state == rulesIntact || err != nil {
		return false, err
	}
	n.use.Lock()
	defer n.use.Unlock()
	// The members may have changed meanwhile.
	if members, err = n.List(); err != nil || len(members) == 0 {
		return false, err
	}
	state, err = n.checkRules(ctx, members)
	if state == rulesIntact || err != nil {
		return false, err
	}
	if err := n.applyRules(); err != nil {
		return false, err
	}
	if err := n.allowForwarding(ctx); err != nil {
		n.applied = nil // the next pass repeats all
		return false, err
	}
	return state == rulesChanged, nil
}

// rulesState is the result of a check of the firewall table.
type rulesState int

const (
	// rulesOutdated: the agent has not made the table since it started, or should make another now.
	rulesOutdated rulesState = iota
	// rulesChanged: another program has changed the table.
	rulesChanged
	rulesIntact
)

// checkRules compares the rules that the agent should have made with those that it made, and these with the kernel's.
func (n *Network) checkRules(ctx context.Context, members []string) (rulesState, error) {
	if n.applied == nil {
		return rulesOutdated, nil
	}
	in, err := n.rulesetInput(n.applied.features, n.earlierLinks)
	if err != nil {
		return rulesOutdated, err
	}
	want := generateRules(in)
	if !reflect.DeepEqual(want, *n.applied) {
		return rulesOutdated, nil
	}
	if !n.isIntact(ctx, want, members) {
		return rulesChanged, nil
	}
	return rulesIntact, nil
}

// maxChecks bounds how often the table is compared again because it changed meanwhile.
const maxChecks = 5

// isIntact reports whether the kernel has these rules and the members' ports.
func (n *Network) isIntact(ctx context.Context, want ruleset, members []string) bool {
	var found string
	for range maxChecks {
		generation, err := rulesetGeneration()
		if verified := n.verifiedGeneration.Load(); err == nil && verified != nil && *verified == generation {
			return true
		}
		if found, err = n.difference(want, n.openingsOf(members)); err != nil {
			n.cfg.Log.WarnContext(ctx, "cannot read the firewall table", slog.Any("error", err))
			return false
		}
		after, err := rulesetGeneration()
		if found == "" && err == nil && after == generation {
			n.verifiedGeneration.Store(&generation)
		}
		if found == "" || err != nil || after == generation {
			break
		}
	}
	if found != "" {
		n.cfg.Log.DebugContext(ctx, "the firewall table has been changed", slog.String("difference", found))
	}
	return found == ""
}

// applyRules replaces the firewall table and keeps the published ports of existing members. Flow features that the
// kernel lacks are left out and reported.
func (n *Network) applyRules() error {
	members, err := n.List()
	if err != nil {
		return err
	}
	links, err := n.findEarlierLinks()
	if err != nil {
		return err
	}
	open := n.openingsOf(members)
	n.applied = nil
	for _, f := range featureSets() {
		in, e := n.rulesetInput(f, links)
		if e != nil {
			return e
		}
		want := generateRules(in)
		if err = n.commit(want, open); err == nil {
			n.applied = &want
			break
		}
	}
	if err != nil {
		return fault.New(fault.Unavailable, codeFirewallFailed,
			"The node cannot make its firewall table: load the kernel module nf_tables.", err)
	}
	n.earlierLinks = links
	n.countsFlows.Store(n.applied.features.limits)
	if slices.ContainsFunc(members, n.isReady) {
		n.countsLost.Store(true)
	}
	n.missing.Store(new(n.applied.features.conditions()))
	return nil
}

// rulesetInput gathers what the rules depend on.
func (n *Network) rulesetInput(f features, earlierLinks []string) (rulesetInput, error) {
	in := rulesetInput{
		bridge: n.cfg.Bridge, members: n.prefix, features: f, earlierLinks: earlierLinks,
		resolvers: n.resolverNetworks(), maxOpenFlows: openFlowLimit(), natPorts: natPorts(),
	}
	if n.cfg.Egress != nil {
		in.egress = n.cfg.Egress()
	}
	var err error
	in.connected, err = n.connectedNetworks()
	return in, err
}

// findEarlierLinks lists the links that existed when an agent turned forwarding on. The machine did not route between
// them; links that came later belong to programs that may rely on forwarding.
func (n *Network) findEarlierLinks() (links []string, err error) {
	err = n.withHostState(func(h *hostState) error {
		if err := h.join(n.cfg.Bridge); err != nil {
			return err
		}
		links = slices.DeleteFunc(h.Found.links(), func(link string) bool { return slices.Contains(h.Bridges, link) })
		return nil
	})
	return links, err
}

// Conditions name the flow features that the kernel lacks, which is known from the first member on, and whether another
// program uses a published port.
func (n *Network) Conditions() []string {
	var c []string
	if missing := n.missing.Load(); missing != nil {
		c = append(c, *missing...)
	}
	if n.portInUse.Load() {
		c = append(c, protocol.ConditionPortInUse)
	}
	return c
}

// rulesetGeneration is the kernel's generation of all nftables rules in this network namespace; any change by any
// program increases it (linux/netfilter/nf_tables.h, NFT_MSG_GETGEN). The nftables library cannot read it.
func rulesetGeneration() (uint32, error) {
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETGEN, 0)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
	answers, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return 0, err
	}
	for _, m := range answers {
		if len(m) < nl.SizeofNfgenmsg {
			continue
		}
		attrs, err := nl.ParseRouteAttr(m[nl.SizeofNfgenmsg:])
		if err != nil {
			return 0, err
		}
		for _, a := range attrs {
			if a.Attr.Type == unix.NFTA_GEN_ID && len(a.Value) == 4 {
				return binary.BigEndian.Uint32(a.Value), nil
			}
		}
	}
	return 0, errors.New("the kernel tells no generation of its rules")
}
