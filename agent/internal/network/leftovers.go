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

	"github.com/gpuaas/gpuaas/protocol"
)

// Leftovers lists what is still there of a member, as "<kind> <what>" with the kinds of package protocol. It looks at the
// machine, not only at what was noted. An empty list is the network's part of a removal proof.
func (n *Network) Leftovers(ctx context.Context, memberID string) ([]string, error) {
	if err := checkMember(memberID); err != nil {
		return nil, err
	}
	var out []string
	for _, path := range []string{n.netnsPath(memberID), n.usernsPath(memberID), n.recordPath(memberID)} {
		if fileExists(path) {
			out = append(out, protocol.AbsentNetworkNamespace+" "+path)
		}
	}
	addresses, err := n.addressesOf(memberID)
	if err != nil {
		return nil, err
	}
	for _, a := range addresses {
		out = append(out, protocol.AbsentAddress+" "+a)
	}
	if r, err := n.readRecord(memberID); err == nil && r.HostLink != "" {
		if _, err := netlink.LinkByName(r.HostLink); err == nil {
			out = append(out, protocol.AbsentNetworkNamespace+" link "+r.HostLink)
		}
	}
	ports, err := n.openPorts(ctx, memberID)
	if err != nil {
		return nil, err
	}
	for _, port := range ports {
		out = append(out, protocol.AbsentRule+" port "+port+" in table "+n.table(), protocol.AbsentPort+" "+port)
	}
	cached, err := filepath.Glob(filepath.Join(cniCache, "results", n.cfg.Bridge+"-"+memberID+"-*"))
	if err != nil {
		return nil, err
	}
	for _, name := range cached {
		out = append(out, protocol.AbsentNetworkNamespace+" "+name)
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

// addressesOf reads host-local's store: a file for each address, with the owner's id in its first line.
func (n *Network) addressesOf(memberID string) ([]string, error) {
	dir := filepath.Join(n.ipamDir(), n.cfg.Bridge)
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	var all []string
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			continue // given back meanwhile
		}
		if owner, _, _ := strings.Cut(string(data), "\n"); strings.TrimSpace(owner) == memberID {
			all = append(all, e.Name())
		}
	}
	return all, nil
}

func fileExists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
