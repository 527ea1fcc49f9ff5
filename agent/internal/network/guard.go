package network

import (
	"context"
	"encoding/binary"
	"errors"
	"regexp"
	"slices"
	"strconv"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/protocol"
)

// Guard compares the firewall table with what it is to be, and makes it again in one step when someone has changed it,
// which it reports (an administrator's `nft flush ruleset` removes the isolation of members, law 10), and when the
// owner's policy, the name servers or the machine's networks have changed. While nothing changes, a look is two
// questions to the kernel. Without members there is nothing to guard.
func (n *Network) Guard(ctx context.Context) (restored bool, err error) {
	members, err := n.List(ctx)
	if err != nil || len(members) == 0 {
		return false, err
	}
	if err := n.holdAll(members); err != nil {
		n.cfg.Log.WarnContext(ctx, "another program uses a published port; connections to it reach a member", "cause", err)
	}
	n.use.RLock()
	_, whole, err := n.tableStands(ctx, members)
	n.use.RUnlock()
	if whole || err != nil {
		return false, err
	}
	n.use.Lock()
	defer n.use.Unlock()
	// A member may have come or gone meanwhile.
	if members, err = n.List(ctx); err != nil || len(members) == 0 {
		return false, err
	}
	current, whole, err := n.tableStands(ctx, members)
	if whole || err != nil {
		return false, err
	}
	// An agent that has just started does not know what was there.
	known := n.walls != "" && current
	if err := n.makeTable(ctx); err != nil {
		return false, err
	}
	if err := n.openForward(ctx); err != nil {
		n.walls = "" // all of it again with the next look
		return false, err
	}
	return known, nil
}

// mapElements are the ports in nft's listing of the table.
var mapElements = regexp.MustCompile(`(?s)\s*elements = \{.*?\}`)

// listTable is the table as the kernel has it, and without the ports, which come and go; empty when there is none.
func (n *Network) listTable(ctx context.Context) (whole, walls string) {
	out, err := run(ctx, "", "nft", "--stateless", "list", "table", "inet", n.table())
	if err != nil {
		return "", ""
	}
	return string(out), mapElements.ReplaceAllString(string(out), "")
}

// tableStands says whether the table that was made is still the one to make, and whether the kernel has all of that.
func (n *Network) tableStands(ctx context.Context, members []string) (current, whole bool, err error) {
	rules, err := n.rules()
	if err != nil {
		return false, false, err
	}
	current = rules == n.applied
	return current, current && n.kernelHasTable(ctx, members), nil
}

// kernelHasTable compares the kernel's table with the one that was made and with the members' ports.
func (n *Network) kernelHasTable(ctx context.Context, members []string) bool {
	// Read first: what changes while the table is listed is looked at again.
	generation, err := rulesetGeneration()
	if seen := n.sound.Load(); err == nil && seen != nil && *seen == generation {
		return true
	}
	whole, walls := n.listTable(ctx)
	if walls == "" || walls != n.walls {
		return false
	}
	open := portElement.FindAllStringSubmatch(whole, -1)
	for _, id := range members {
		r, err := n.readRecord(id)
		if err != nil || !r.Ready {
			continue
		}
		for _, p := range r.Ports {
			if !slices.ContainsFunc(open, func(e []string) bool { return e[1] == strconv.Itoa(int(p.HostPort)) && e[2] == id }) {
				return false
			}
		}
	}
	if err == nil {
		n.sound.Store(&generation)
	}
	return true
}

// Conditions say what the kernel cannot do for the isolation of members, which is known from the first member on, and
// whether another program uses a published port.
func (n *Network) Conditions() []string {
	var c []string
	if lacks := n.lacks.Load(); lacks != nil {
		c = append(c, *lacks...)
	}
	if n.portInUse.Load() {
		c = append(c, protocol.ConditionPortInUse)
	}
	return c
}

// rulesetGeneration is the number that the kernel gives to all nftables rules of this network namespace: another one
// after each change by anybody (linux/netfilter/nf_tables.h, NFT_MSG_GETGEN).
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
