package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// leases are the attachments' addresses. A free address is reused only after all others: a peer that still talks to its
// last owner must not reach the next one.
type leases struct {
	// Last is the address that was allocated last; not valid before the first.
	Last netip.Addr `json:"last"`
	// Attachments maps the ids of attachments to their addresses.
	Attachments map[string]netip.Addr `json:"attachments"`
}

// leasesPath is the file of the leases. It is replaced by a rename, and need not be synced: when the machine goes down,
// so do the networks.
func (n *Network) leasesPath() string { return filepath.Join(n.cfg.StateDir, "addresses.json") }

// gateway is the bridge's address: the network's first.
func (n *Network) gateway() netip.Addr { return n.prefix.Addr().Next() }

// loadLeases reads the leases. A lease without a record has leaked and is dropped; a record with an address is
// a lease even if the file is lost.
func (n *Network) loadLeases() error {
	n.ipam.Lock()
	defer n.ipam.Unlock()
	n.leases = leases{Attachments: map[string]netip.Addr{}}
	var stored leases
	data, err := os.ReadFile(n.leasesPath())
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return fmt.Errorf("read the members' addresses: %w", err)
	default:
		if err := json.Unmarshal(data, &stored); err != nil {
			n.cfg.Log.Warn("the file of the members' addresses is damaged; their records are used", slog.Any("error", err))
			stored = leases{}
		}
	}
	n.leases.Last = stored.Last
	all, err := n.List()
	if err != nil {
		return err
	}
	for _, id := range all {
		if ip, ok := stored.Attachments[id]; ok {
			n.leases.Attachments[id] = ip
		} else if r, err := n.readRecord(id); err == nil && r.IP.IsValid() {
			n.leases.Attachments[id] = r.IP
		}
	}
	return nil
}

// allocateAddress gives the attachment an address that no other has.
func (n *Network) allocateAddress(id string) (netip.Addr, error) {
	// Close removes the file only while there is no record; this attachment has one.
	n.use.RLock()
	defer n.use.RUnlock()
	n.ipam.Lock()
	defer n.ipam.Unlock()
	if ip, ok := n.leases.Attachments[id]; ok {
		return ip, nil
	}
	next := leases{Attachments: maps.Clone(n.leases.Attachments)}
	ip, ok := n.leases.nextFree(n.prefix)
	if !ok {
		maps.DeleteFunc(next.Attachments, func(id string, _ netip.Addr) bool { return !fileExists(n.recordPath(id)) })
		if ip, ok = (leases{n.leases.Last, next.Attachments}).nextFree(n.prefix); !ok {
			return netip.Addr{}, fault.New(fault.Unavailable, codeNetworkFull, "The node's network for members has no free "+
				"address: remove members or take a larger --pod-cidr.", nil)
		}
	}
	next.Last, next.Attachments[id] = ip, ip
	return ip, n.storeLeases(next)
}

// nextFree is the first free address after the last one.
func (l leases) nextFree(network netip.Prefix) (netip.Addr, bool) {
	first, last := network.Addr().Next().Next(), lastUsable(network)
	used := make(map[netip.Addr]bool, len(l.Attachments))
	for _, ip := range l.Attachments {
		used[ip] = true
	}
	begin := last
	if l.Last.IsValid() && !l.Last.Less(first) && !last.Less(l.Last) {
		begin = l.Last
	}
	for ip := begin; ; {
		if ip = ip.Next(); last.Less(ip) {
			ip = first
		}
		if !used[ip] {
			return ip, true
		}
		if ip == begin {
			return netip.Addr{}, false
		}
	}
}

// lastUsable is the address before the broadcast address.
func lastUsable(p netip.Prefix) netip.Addr {
	b := p.Addr().As4()
	for bit := p.Bits(); bit < 32; bit++ {
		b[bit/8] |= 1 << (7 - bit%8)
	}
	return netip.AddrFrom4(b).Prev()
}

// releaseAddress ends the attachment's lease, if it has one.
func (n *Network) releaseAddress(id string) error {
	n.ipam.Lock()
	defer n.ipam.Unlock()
	if _, ok := n.leases.Attachments[id]; !ok {
		return nil
	}
	next := leases{Last: n.leases.Last, Attachments: maps.Clone(n.leases.Attachments)}
	delete(next.Attachments, id)
	return n.storeLeases(next)
}

// storeLeases writes the leases and uses them from then on. The caller holds ipam.
func (n *Network) storeLeases(next leases) error {
	if err := writeJSON(n.leasesPath(), next); err != nil {
		return fmt.Errorf("write the members' addresses: %w", err)
	}
	n.leases = next
	return nil
}

// removeLeases removes the file when no attachment is left, and keeps the last address in memory.
func (n *Network) removeLeases() error {
	n.ipam.Lock()
	defer n.ipam.Unlock()
	n.leases.Attachments = map[string]netip.Addr{}
	if err := os.RemoveAll(n.leasesPath()); err != nil {
		return fmt.Errorf("remove the members' addresses: %w", err)
	}
	return nil
}

// addressOf is the attachment's address.
func (n *Network) addressOf(id string) (ip netip.Addr, ok bool) {
	n.ipam.Lock()
	defer n.ipam.Unlock()
	ip, ok = n.leases.Attachments[id]
	return ip, ok
}

// addresses are those of all attachments.
func (n *Network) addresses() map[string]netip.Addr {
	n.ipam.Lock()
	defer n.ipam.Unlock()
	return maps.Clone(n.leases.Attachments)
}

// unfinishedSuffix ends the name of a file that has yet to replace another.
const unfinishedSuffix = ".new"

// writeJSON replaces the file at path in one step.
func writeJSON(path string, content any) error {
	data, err := json.Marshal(content)
	if err != nil {
		return err
	}
	unfinished := path + unfinishedSuffix
	if err = os.WriteFile(unfinished, data, 0o600); err == nil {
		err = os.Rename(unfinished, path)
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(unfinished))
	}
	return nil
}
