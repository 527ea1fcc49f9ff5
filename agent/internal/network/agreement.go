package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

const ipForward = "net/ipv4/ip_forward"

// agreement is what the agents of one network namespace share: what was there before the first of them, and who is
// still there. The last one restores.
type agreement struct {
	Previous previous `json:"previous"`
	// Users are the bridges of the agents.
	Users []string `json:"users"`

	path string
	// abandoned says that the last users are gone and have restored nothing: what the first one found still counts.
	abandoned bool
}

// previous is how the first agent found the machine.
type previous struct {
	BootID string `json:"boot_id"`
	// Sysctls by path below /proc/sys; only those that turning on forwarding changes, and only when it was off.
	Sysctls map[string]string `json:"sysctls"`
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
		a.Previous, a.Users = previous{BootID: n.bootID}, nil
	}
	// An agent whose bridge is gone has left without a word: it was killed while it left, or someone removed the bridge by
	// hand.
	users := len(a.Users)
	a.Users = slices.DeleteFunc(a.Users, func(bridge string) bool {
		_, err := netlink.LinkByName(bridge)
		return err != nil && bridge != n.cfg.Bridge
	})
	a.abandoned = users > 0 && len(a.Users) == 0
	if err := fn(a); err != nil {
		return err
	}
	if len(a.Users) > 0 {
		return nil
	}
	if a.abandoned {
		if err := a.Previous.restoreSysctls(); err != nil {
			return err
		}
	}
	if err := os.Remove(a.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return removeLockDir(n.cfg.SharedDir)
}

// join adds an agent. The first one notes how it finds the machine.
func (a *agreement) join(bridge string) error {
	if slices.Contains(a.Users, bridge) {
		return nil
	}
	if len(a.Users) == 0 && !a.abandoned {
		found, err := lookAround(a.Previous.BootID)
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
func (a *agreement) leave(bridge string) error {
	was := len(a.Users)
	a.Users = slices.DeleteFunc(a.Users, func(u string) bool { return u == bridge })
	if len(a.Users) > 0 {
		return a.save()
	}
	if was == 0 {
		return nil // nothing was changed
	}
	return a.Previous.restoreSysctls()
}

func lookAround(bootID string) (previous, error) {
	p := previous{BootID: bootID, Sysctls: map[string]string{}}
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
	return p, nil
}

// linkPattern leaves out names that a firewall script would read as something else.
var linkPattern = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.@:+-]{0,14}$`)

// links are the links that were there when forwarding was turned on; none where it was on already.
func (p previous) links() []string {
	var links []string
	for name := range p.Sysctls {
		link := filepath.Base(filepath.Dir(name))
		if filepath.Base(name) == "forwarding" && link != "all" && link != "default" && link != "lo" &&
			linkPattern.MatchString(link) {
			links = append(links, link)
		}
	}
	slices.Sort(links)
	return links
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
		return fault.New(fault.Unavailable, "sysctl_refused", "The node cannot set "+strings.ReplaceAll(name, "/", ".")+
			": the agent needs root and a writable /proc/sys.", err)
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
			return nil, fault.New(fault.Unavailable, "directory_unusable", "The agent cannot make its directory "+dir+
				": run it as root.", err)
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
