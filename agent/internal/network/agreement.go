package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

const ipForward = "net/ipv4/ip_forward"

// agreement is what the agents of one network namespace share: what was there before the first of them, and who is still
// there. The last one restores.
type agreement struct {
	Previous previous `json:"previous"`
	// Users are the bridges of the agents.
	Users []string `json:"users"`

	path string
}

// previous is how the first agent found the machine.
type previous struct {
	BootID string `json:"boot_id"`
	// Sysctls by path below /proc/sys; only those that turning on forwarding changes, and only when it was off.
	Sysctls map[string]string `json:"sysctls"`
	// HostPortChains is set when another user of CNI had made portmap's shared chains.
	HostPortChains bool `json:"host_port_chains"`
	// Tables are iptables' nat tables that were there.
	Tables []string `json:"tables"`
	// Dirs are libcni's directories that were there.
	Dirs []string `json:"dirs"`
	// Brought are those that an agent brought before the last boot.
	Brought []string `json:"brought,omitempty"`
}

// agree lets fn work on the agreement of this network namespace while no other agent does.
func (n *Network) agree(fn func(*agreement) error) error {
	var self unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &self); err != nil {
		return fmt.Errorf("look at the own network namespace: %w", err)
	}
	unlock, err := lockDir(n.cfg.SharedDir)
	if err != nil {
		return err
	}
	defer unlock()
	a := &agreement{path: filepath.Join(n.cfg.SharedDir, fmt.Sprintf("netns-%d.json", self.Ino))}
	if data, err := os.ReadFile(a.path); err == nil {
		// A file that cannot be read says nothing; it is replaced.
		_ = json.Unmarshal(data, a)
	}
	if a.Previous.BootID != n.bootID {
		// Files outlive a boot: directories that an agent brought are still known as such.
		fresh := previous{BootID: n.bootID}
		if len(a.Users) > 0 {
			fresh.Brought = slices.DeleteFunc(cniDirs(), func(dir string) bool { return slices.Contains(a.Previous.Dirs, dir) })
		}
		a.Previous, a.Users = fresh, nil
	}
	// An agent whose bridge is gone has left without a word: its namespace has ended, or someone removed it by hand.
	a.Users = slices.DeleteFunc(a.Users, func(bridge string) bool {
		_, err := netlink.LinkByName(bridge)
		return err != nil && bridge != n.cfg.Bridge
	})
	if err := fn(a); err != nil {
		return err
	}
	if len(a.Users) > 0 {
		return nil
	}
	if err := os.Remove(a.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return removeLockDir(n.cfg.SharedDir)
}

// join adds an agent. The first one notes how it finds the machine.
func (a *agreement) join(ctx context.Context, bridge string) error {
	if slices.Contains(a.Users, bridge) {
		return nil
	}
	if len(a.Users) == 0 {
		found, err := lookAround(ctx, a.Previous)
		if err != nil {
			return err
		}
		a.Previous = found
	}
	a.Users = append(a.Users, bridge)
	return a.save()
}

func (a *agreement) save() error {
	data, err := json.Marshal(a)
	if err != nil {
		return err
	}
	if err := os.WriteFile(a.path+".new", data, 0o600); err != nil {
		return err
	}
	return os.Rename(a.path+".new", a.path)
}

// leave takes an agent away. The last one restores what the first one found.
func (a *agreement) leave(ctx context.Context, bridge string) error {
	was := len(a.Users)
	a.Users = slices.DeleteFunc(a.Users, func(u string) bool { return u == bridge })
	if len(a.Users) > 0 {
		return a.save()
	}
	if was == 0 {
		return nil // nothing was changed
	}
	if err := a.Previous.restoreChains(ctx); err != nil {
		return err
	}
	for _, dir := range cniDirs() {
		if !slices.Contains(a.Previous.Dirs, dir) {
			_ = os.Remove(dir) // only an empty one goes
		}
	}
	return a.Previous.restoreSysctls()
}

func cniDirs() []string { return []string{filepath.Join(cniCache, "results"), cniCache} }

func lookAround(ctx context.Context, known previous) (previous, error) {
	p := previous{BootID: known.BootID, Brought: known.Brought, Sysctls: map[string]string{}}
	forwarding, err := readSysctl(ipForward)
	if err != nil {
		return previous{}, err
	}
	if forwarding == "0" {
		// Turning it on sets all of these (inet_forward_change in the kernel's net/ipv4/devinet.c).
		names, _ := filepath.Glob("/proc/sys/net/ipv4/conf/*/forwarding")
		names = append(names, "/proc/sys/net/ipv4/conf/all/accept_redirects", "/proc/sys/"+ipForward)
		for _, name := range names {
			name = strings.TrimPrefix(name, "/proc/sys/")
			if value, err := readSysctl(name); err == nil {
				p.Sysctls[name] = value
			}
		}
	}
	nat, err := natRules(ctx)
	if err != nil {
		return previous{}, err
	}
	p.HostPortChains = strings.Contains(nat, ":"+hostPortChain)
	for _, dir := range cniDirs() {
		if _, err := os.Stat(dir); err == nil && !slices.Contains(known.Brought, dir) {
			p.Dirs = append(p.Dirs, dir)
		}
	}
	p.Tables, err = natTables(ctx)
	return p, err
}

func readSysctl(name string) (string, error) {
	data, err := os.ReadFile(filepath.Join("/proc/sys", name))
	return strings.TrimSpace(string(data)), err
}

func writeSysctl(name, value string) error {
	if had, err := readSysctl(name); err == nil && had == value {
		return nil
	}
	if err := os.WriteFile(filepath.Join("/proc/sys", name), []byte(value), 0); err != nil {
		return fault.New(fault.Unavailable, "sysctl_refused", "The node cannot set "+strings.ReplaceAll(name, "/", ".")+": the agent needs root and a writable /proc/sys.", err)
	}
	return nil
}

func (p previous) restoreSysctls() error {
	value, ok := p.Sysctls[ipForward]
	if !ok {
		return nil
	}
	if err := writeSysctl(ipForward, value); err != nil {
		return err
	}
	for name, value := range p.Sysctls {
		if err := writeSysctl(name, value); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// lockDir makes the directory and holds its lock until unlock is called.
func lockDir(dir string) (unlock func(), err error) {
	path := filepath.Join(dir, "lock")
	for {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fault.New(fault.Unavailable, "directory_unusable", "The agent cannot make its directory "+dir+": run it as root.", err)
		}
		lock, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		if errors.Is(err, fs.ErrNotExist) {
			continue // the last agent left in between
		}
		if err != nil {
			return nil, err
		}
		if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
			_ = lock.Close()
			return nil, fmt.Errorf("wait for other agents: %w", err)
		}
		// The file may have been removed while this call waited for it: then its lock protects nothing.
		mine, err1 := lock.Stat()
		now, err2 := os.Stat(path)
		if err1 == nil && err2 == nil && os.SameFile(mine, now) {
			return func() { _ = lock.Close() }, nil
		}
		_ = lock.Close()
	}
}

// removeLockDir removes the directory when no agent of any network namespace is left. The caller holds the lock.
func removeLockDir(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) > 1 {
		return err
	}
	if err := os.Remove(filepath.Join(dir, "lock")); err != nil {
		return err
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, syscall.ENOTEMPTY) && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// hostPortChain begins the names of portmap's shared chains: CNI-HOSTPORT-DNAT, -SETMARK and -MASQ.
const (
	hostPortChain = "CNI-HOSTPORT-"
	dnatChain     = hostPortChain + "DNAT"
)

func natRules(ctx context.Context) (string, error) {
	out, err := run(ctx, "", "iptables-save", "-t", "nat")
	if err != nil {
		return "", fault.New(fault.Unavailable, "firewall_failed", "The node cannot read its firewall: install iptables (apt-get install iptables).", err)
	}
	return string(out), nil
}

func natTables(ctx context.Context) ([]string, error) {
	out, err := run(ctx, "", "nft", "list", "tables")
	if err != nil {
		return nil, fault.New(fault.Unavailable, "firewall_failed", "The node cannot read its firewall: install nftables (apt-get install nftables).", err)
	}
	var tables []string
	for line := range strings.Lines(string(out)) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "table "); ok && strings.HasSuffix(name, " nat") {
			tables = append(tables, name)
		}
	}
	return tables, nil
}

// restoreChains removes portmap's shared chains when they were not there before and nobody publishes a port through them.
func (p previous) restoreChains(ctx context.Context) error {
	nat, err := natRules(ctx)
	if err != nil {
		return err
	}
	if !p.HostPortChains && strings.Contains(nat, ":"+hostPortChain) && !strings.Contains(nat, "\n-A "+dnatChain+" ") {
		// One transaction: when another user of CNI adds a rule now, its chain is not empty, and nothing is removed.
		if _, err := run(ctx, removalScript(nat), "iptables-restore", "--noflush", "-w", "30"); err != nil {
			if again, e := natRules(ctx); e != nil || !strings.Contains(again, "\n-A "+dnatChain+" ") {
				return fmt.Errorf("remove portmap's shared chains: %w", err)
			}
		}
	}
	tables, err := natTables(ctx)
	if err != nil {
		return err
	}
	for _, table := range tables {
		if !slices.Contains(p.Tables, table) {
			if err := dropEmptyTable(ctx, table); err != nil {
				return err
			}
		}
	}
	return nil
}

func removalScript(nat string) string {
	var jumps, flush, remove []string
	for line := range strings.Lines(nat) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, ":"+hostPortChain):
			name := strings.TrimPrefix(strings.Fields(line)[0], ":")
			if name != dnatChain {
				flush = append(flush, "-F "+name)
			}
			remove = append(remove, "-X "+name)
		case strings.HasPrefix(line, "-A ") && !strings.HasPrefix(line, "-A CNI-") && strings.Contains(line, "-j "+hostPortChain):
			jumps = append(jumps, "-D "+strings.TrimPrefix(line, "-A "))
		}
	}
	return "*nat\n" + strings.Join(slices.Concat(jumps, flush, remove), "\n") + "\nCOMMIT\n"
}

// dropEmptyTable removes a table that iptables made on the way, when neither it nor its chains hold a rule. The kernel itself
// makes sure of that: with NLM_F_NONREC it refuses to delete what is in use, and then nothing of the batch happens.
func dropEmptyTable(ctx context.Context, table string) error {
	out, err := run(ctx, "", "nft", append([]string{"list", "table"}, strings.Fields(table)...)...)
	if _, failed := errors.AsType[*exec.ExitError](err); failed {
		return nil // gone meanwhile
	}
	if err != nil {
		return err
	}
	family, name, _ := strings.Cut(table, " ")
	var chains []string
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		switch {
		case len(f) == 3 && f[0] == "chain":
			chains = append(chains, f[1])
		case len(f) > 0 && f[0] != "type" && f[0] != "table" && f[0] != "}" && f[0] != "#":
			return nil // it has rules
		}
	}
	return deleteUnused(family, name, chains)
}
