package leakcheck

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/netnamespace"
)

// takeNetwork records this process's network namespace and those that the scope names.
func takeNetwork(s *Snapshot) error {
	if err := takeOneNetwork(s, ""); err != nil {
		return err
	}
	for _, path := range s.scope.NetNS {
		err := netnamespace.Run(path, func() error { return takeOneNetwork(s, " in "+path) })
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("enter %s: %w", path, err)
		}
	}
	return nil
}

func takeOneNetwork(s *Snapshot, where string) error {
	return errors.Join(takeLinks(s, where), takeRoutes(s, where), takeFirewall(s, where), takeSysctls(s, where))
}

func takeLinks(s *Snapshot, where string) error {
	links, err := netnamespace.List(netlink.LinkList)
	if err != nil {
		return fmt.Errorf("list links: %w", err)
	}
	names := map[int]string{}
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	for _, l := range links {
		a := l.Attrs()
		addrs, err := netnamespace.List(func() ([]netlink.Addr, error) { return netlink.AddrList(l, netlink.FAMILY_ALL) })
		if err != nil && !errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("list addresses of %s: %w", a.Name, err)
		}
		var texts []string
		for _, addr := range addrs {
			texts = append(texts, addr.IPNet.String())
		}
		slices.Sort(texts)
		s.add(Link, a.Name+where, fmt.Sprintf("%s master %q mtu %d %s addresses %v", l.Type(), names[a.MasterIndex], a.MTU,
			a.Flags, texts))
	}
	return nil
}

func takeRoutes(s *Snapshot, where string) error {
	links, err := netnamespace.List(netlink.LinkList)
	if err != nil {
		return fmt.Errorf("list links: %w", err)
	}
	names := map[int]string{}
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := netnamespace.List(func() ([]netlink.Route, error) {
			return netlink.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
		})
		if err != nil {
			return fmt.Errorf("list routes: %w", err)
		}
		for _, r := range routes {
			// The neighbour discovery of IPv6 adds and renews these by itself.
			if r.Protocol == unix.RTPROT_RA || r.Flags&unix.RTM_F_CLONED != 0 {
				continue
			}
			s.add(Route, fmt.Sprintf("%v via %v dev %s table %d%s", r.Dst, r.Gw, names[r.LinkIndex], r.Table, where), "")
		}
		rules, err := netlink.RuleList(family)
		if err != nil {
			return fmt.Errorf("list routing rules: %w", err)
		}
		for _, r := range rules {
			s.add(Route, fmt.Sprintf("rule of family %d %s%s", family, r.String(), where), "")
		}
	}
	return nil
}

// commandTimeout bounds each listing command.
const commandTimeout = 20 * time.Second

// takeFirewall lists nftables and both kinds of iptables, without counters.
func takeFirewall(s *Snapshot, where string) error {
	if err := takeNft(s, where); err != nil {
		return err
	}
	for _, legacy := range []struct{ tables, command string }{
		{"/proc/net/ip_tables_names", "iptables-legacy-save"}, {"/proc/net/ip6_tables_names", "ip6tables-legacy-save"},
	} {
		// The file is that of the process's main thread; where only another namespace uses legacy tables, the command
		// below would still be needed, so only a kernel without them is skipped.
		if _, err := os.Stat(legacy.tables); err != nil {
			continue
		}
		out, err := command(legacy.command)
		if errors.Is(err, exec.ErrNotFound) {
			continue
		}
		if err != nil {
			return err
		}
		table := ""
		for _, line := range lines(out) {
			switch {
			case strings.HasPrefix(line, "*"):
				table = line
			case strings.HasPrefix(line, "-A"), strings.HasPrefix(line, ":") && strings.Contains(line, " - "),
				strings.Contains(line, " DROP "):
				s.add(Firewall, fmt.Sprintf("%s %s %s%s", legacy.command, table, strings.Split(line, " [")[0], where), "")
			}
		}
	}
	return nil
}

// takeNft adds every chain and rule of nft's listing as "table | chain | rule". Empty tables and empty base chains with
// the policy accept are noise: iptables makes them when it merely lists, and they do nothing.
func takeNft(s *Snapshot, where string) error {
	out, err := command("nft", "--stateless", "list", "ruleset")
	if errors.Is(err, exec.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	var path []string
	seen := map[string]int{}
	for _, raw := range lines(out) {
		line := strings.TrimSpace(raw)
		switch {
		case line == "" || strings.HasPrefix(line, "#"):
		case line == "}" || line == "};":
			if len(path) > 0 {
				path = path[:len(path)-1]
			}
		case strings.HasSuffix(line, "{"):
			path = append(path, strings.TrimSpace(strings.TrimSuffix(line, "{")))
			if len(path) == 2 && !strings.HasPrefix(path[1], "chain") {
				s.add(Firewall, strings.Join(path, " | ")+where, "")
			}
		case strings.HasPrefix(line, "type ") && strings.Contains(line, " hook ") && strings.HasSuffix(line,
			"policy accept;"):
		default:
			id := strings.Join(append(slices.Clone(path), line), " | ") + where
			seen[id]++
			s.add(Firewall, id, fmt.Sprintf("× %d", seen[id]))
		}
	}
	return takeNftChains(s, where)
}

// takeNftChains adds the chains that hang on no hook: an empty one is a remainder too.
func takeNftChains(s *Snapshot, where string) error {
	out, err := command("nft", "--stateless", "list", "chains")
	if err != nil {
		return err
	}
	table, chain, base := "", "", false
	for _, raw := range lines(out) {
		line := strings.TrimSpace(raw)
		switch {
		case strings.HasPrefix(line, "table "):
			table = strings.TrimSuffix(line, " {")
		case strings.HasPrefix(line, "chain "):
			chain, base = strings.TrimSuffix(line, " {"), false
		case strings.HasPrefix(line, "type "):
			base = true
		case line == "}" && chain != "":
			if !base {
				s.add(Firewall, table+" | "+chain+where, "")
			}
			chain = ""
		}
	}
	return nil
}

func command(name string, args ...string) ([]byte, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		// Not every user's PATH holds the administrator's commands.
		if path, err = exec.LookPath(filepath.Join("/usr/sbin", name)); err != nil {
			return nil, err
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), commandTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, args...).Output()
	if err != nil {
		return nil, fmt.Errorf("run %s: %w", name, err)
	}
	return out, nil
}

// takeSysctls reads the network settings, where CNI plugins and firewalls change things, and the limits on namespaces.
func takeSysctls(s *Snapshot, where string) error {
	roots := []string{"net/ipv4", "net/ipv6", "net/bridge"}
	if where == "" {
		roots = append(roots, "user", "net/core", "kernel/unprivileged_userns_clone", "kernel/keys", "vm/overcommit_memory",
			"vm/max_map_count")
	}
	// /proc/sys/net is that of the reading thread.
	for _, root := range roots {
		err := filepath.WalkDir(filepath.Join("/proc/sys", root), func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err != nil || d.IsDir() || noisySysctl(path) {
				return err
			}
			value, err := os.ReadFile(path)
			if err != nil {
				// Write-only and unset ones, and links that went meanwhile, cannot be read; they have no state to compare.
				return nil //nolint:nilerr // see above
			}
			name := strings.ReplaceAll(strings.TrimPrefix(path, "/proc/sys/"), "/", ".")
			s.add(Sysctl, name+where, strings.Join(strings.Fields(string(value)), " "))
			return nil
		})
		if err != nil {
			return fmt.Errorf("read sysctls: %w", err)
		}
	}
	return nil
}

// noisySysctl reports whether the kernel changes the setting by itself.
func noisySysctl(path string) bool {
	switch filepath.Base(path) {
	case "tcp_mem", "udp_mem", "tcp_fastopen_key", "flush", "netdev_rss_key":
		return true
	}
	return false
}
