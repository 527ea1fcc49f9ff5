package network

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// lastReserved holds the address that was given last. An address that was given back is given again only after all
// others: who still speaks to the one that had it must not reach the next.
const lastReserved = "last_reserved_ip.0"

// addressDir holds a file for each address that is given. Names and contents are those of CNI's host-local plugin, with
// which the release of 2026-11-20 gave addresses: either takes over from the other.
func (n *Network) addressDir() string { return filepath.Join(n.ipamDir(), n.cfg.Bridge) }

// gateway is the bridge's address: the network's first.
func (n *Network) gateway() netip.Addr { return n.prefix.Addr().Next() }

// takeAddress gives the member an address that nobody has.
func (n *Network) takeAddress(memberID string) (netip.Addr, error) {
	// Close removes the directory, but not once the member is known, which it is.
	n.use.RLock()
	defer n.use.RUnlock()
	n.addresses.Lock()
	defer n.addresses.Unlock()
	if err := os.MkdirAll(n.addressDir(), 0o711); err != nil { //nolint:gosec // as the directories above it
		return netip.Addr{}, err
	}
	ip, err := n.reserve(memberID)
	if err != nil || ip.IsValid() {
		return ip, err
	}
	if err := n.freeLeaked(); err != nil {
		return netip.Addr{}, err
	}
	if ip, err = n.reserve(memberID); err == nil && !ip.IsValid() {
		err = fault.New(fault.Unavailable, "network_full", "The node's network for members has no free address: remove "+
			"members or take a larger --pod-cidr.", nil)
	}
	return ip, err
}

// reserve gives the first free address after the one that was given last; none is not valid.
func (n *Network) reserve(memberID string) (netip.Addr, error) {
	first, last := n.gateway().Next(), lastUsable(n.prefix)
	begin := last
	was := n.lastGiven // the file goes with the last member
	if data, err := os.ReadFile(filepath.Join(n.addressDir(), lastReserved)); err == nil {
		was, _ = netip.ParseAddr(strings.TrimSpace(string(data)))
	}
	if was.IsValid() && !was.Less(first) && !last.Less(was) {
		begin = was
	}
	for ip := begin; ; {
		if ip = ip.Next(); last.Less(ip) {
			ip = first
		}
		err := n.claim(ip, memberID)
		if err == nil {
			return ip, nil
		}
		if !errors.Is(err, fs.ErrExist) {
			return netip.Addr{}, fmt.Errorf("note address %s: %w", ip, err)
		}
		if ip == begin {
			return netip.Addr{}, nil
		}
	}
}

// claim notes that the member has the address, unless somebody has it.
func (n *Network) claim(ip netip.Addr, memberID string) error {
	//nolint:gosec // the name of an address leads nowhere else
	f, err := os.OpenFile(filepath.Join(n.addressDir(), ip.String()), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	// What a crash or a full disk cuts off belongs to nobody, and is freed as leaked.
	n.lastGiven = ip
	_, err = f.WriteString(memberID + "\r\n" + memberLink)
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(n.addressDir(), lastReserved), []byte(ip.String()), 0o600) //nolint:gosec // as above
}

// lastUsable is the address before the one of all (broadcast).
func lastUsable(p netip.Prefix) netip.Addr {
	b := p.Addr().As4()
	for bit := p.Bits(); bit < 32; bit++ {
		b[bit/8] |= 1 << (7 - bit%8)
	}
	return netip.AddrFrom4(b).Prev()
}

// freeLeaked frees the addresses of members that are not known: a member is noted before it is given an address, and
// forgotten after that was freed.
func (n *Network) freeLeaked() error {
	owners, err := n.addressOwners()
	if err != nil {
		return err
	}
	for ip, owner := range owners {
		if checkMember(owner) == nil && fileExists(n.recordPath(owner)) {
			continue
		}
		if err := os.Remove(filepath.Join(n.addressDir(), ip)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// freeAddresses gives back what the member has.
func (n *Network) freeAddresses(memberID string) error {
	mine, err := n.addressesOf(memberID)
	if err != nil {
		return err
	}
	for _, ip := range mine {
		if err := os.Remove(filepath.Join(n.addressDir(), ip)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("free address %s: %w", ip, err)
		}
	}
	return nil
}

func (n *Network) addressesOf(memberID string) ([]string, error) {
	owners, err := n.addressOwners()
	if err != nil {
		return nil, err
	}
	var mine []string
	for ip, owner := range owners {
		if owner == memberID {
			mine = append(mine, ip)
		}
	}
	return mine, nil
}

// addressOwners says whose each given address is; nobody's is "".
func (n *Network) addressOwners() (map[string]string, error) {
	entries, err := os.ReadDir(n.addressDir())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	owners := make(map[string]string, len(entries))
	for _, e := range entries {
		if _, err := netip.ParseAddr(e.Name()); err != nil {
			continue // the last one's name, a lock of the plugin's
		}
		data, err := os.ReadFile(filepath.Join(n.addressDir(), e.Name()))
		if err != nil {
			continue // given back meanwhile
		}
		owner, _, _ := strings.Cut(string(data), "\n")
		owners[e.Name()] = strings.TrimSpace(owner)
	}
	return owners, nil
}
