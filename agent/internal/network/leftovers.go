package network

import (
	"context"
	"os"
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/gpuaas/gpuaas/protocol"
)

// Leftovers lists what still exists of a member, as "<kind> <what>" with the kinds of package protocol. It checks the
// machine, not only the record. An empty list is the network's part of a removal proof.
func (n *Network) Leftovers(_ context.Context, memberID string) ([]string, error) {
	if err := checkMember(memberID); err != nil {
		return nil, err
	}
	var out []string
	for _, path := range []string{n.netnsPath(memberID), n.usernsPath(memberID), n.recordPath(memberID)} {
		if fileExists(path) {
			out = append(out, protocol.AbsentNetworkNamespace+" "+path)
		}
	}
	if ip, ok := n.addressOf(memberID); ok {
		out = append(out, protocol.AbsentAddress+" "+ip.String())
	}
	link := n.hostLink(memberID)
	if _, err := netlink.LinkByName(link); err == nil {
		out = append(out, protocol.AbsentNetworkNamespace+" link "+link)
	}
	ports, err := n.openPorts(memberID)
	if err != nil {
		return nil, err
	}
	for _, port := range ports {
		out = append(out, protocol.AbsentRule+" port "+port+" in table "+n.tableName(), protocol.AbsentPort+" "+port)
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

func fileExists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
