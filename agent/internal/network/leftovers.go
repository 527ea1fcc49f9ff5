package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/gpuaas/gpuaas/agent/netnamespace"
	"github.com/gpuaas/gpuaas/protocol"
)

// Leftovers lists what still exists of a member, as "<kind> <what>" with the kinds of package protocol. It checks the
// machine, not only the records. An empty list is the network's part of a removal proof.
func (n *Network) Leftovers(_ context.Context, memberID string) ([]string, error) {
	if err := checkID(memberID); err != nil {
		return nil, err
	}
	var out []string
	for _, dir := range []string{n.nsDir(), n.membersDir()} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, e := range entries {
			id := strings.TrimSuffix(e.Name(), filepath.Ext(e.Name()))
			if memberOf(id) == memberID {
				out = append(out, protocol.AbsentNetworkNamespace+" "+filepath.Join(dir, e.Name()))
			}
		}
	}
	for id, ip := range n.addresses() {
		if memberOf(id) == memberID {
			out = append(out, protocol.AbsentAddress+" "+ip.String())
		}
	}
	links, err := netnamespace.List(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	for _, l := range links {
		if id := l.Attrs().Alias; memberOf(id) == memberID && l.Attrs().Name == n.hostLink(id) {
			out = append(out, protocol.AbsentNetworkNamespace+" link "+l.Attrs().Name)
		}
	}
	ports, peers, err := n.openPorts(memberID)
	if err != nil {
		return nil, err
	}
	for _, port := range ports {
		out = append(out, protocol.AbsentRule+" port "+port+" in table "+n.tableName(), protocol.AbsentPort+" "+port)
	}
	if peers > 0 {
		out = append(out, fmt.Sprintf("%s %d peers in table %s", protocol.AbsentRule, peers, n.tableName()))
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

func fileExists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
