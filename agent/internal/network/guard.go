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
)

// Guard looks whether the firewall table is as it was made, with all ports published, and makes it again in one step when someone
// has taken of it: an administrator's `nft flush ruleset` takes all of it, and with it the walls (law 10). It says whether it had
// to. While nothing changes any rule of the host, a look is one question to the kernel. Without members there is nothing to guard.
func (n *Network) Guard(ctx context.Context) (restored bool, err error) {
	members, err := n.List(ctx)
	if err != nil || len(members) == 0 {
		return false, err
	}
	n.use.RLock()
	whole := n.tableStands(ctx, members)
	n.use.RUnlock()
	if whole {
		return false, nil
	}
	n.use.Lock()
	defer n.use.Unlock()
	// A member may have come or gone meanwhile.
	if members, err = n.List(ctx); err != nil || len(members) == 0 || n.tableStands(ctx, members) {
		return false, err
	}
	// An agent that has just started does not know what was there.
	known := n.walls != ""
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

// tableStands compares the kernel's table with the one that was made and with the members' ports.
func (n *Network) tableStands(ctx context.Context, members []string) bool {
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

// rulesetGeneration is the number that the kernel gives to all nftables rules of this network namespace: another one after each
// change by anybody (linux/netfilter/nf_tables.h, NFT_MSG_GETGEN).
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
