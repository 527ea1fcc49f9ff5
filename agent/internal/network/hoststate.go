package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

const ipForward = "net/ipv4/ip_forward"

// hostState is shared by the agents of one network namespace: the settings that the first agent found, and the agents
// that use it. The last agent restores the settings.
type hostState struct {
	Found snapshot `json:"found"`
	// Bridges name the agents.
	Bridges []string `json:"bridges"`

	path string
	// abandoned says that the last agents ended without restoring the settings, so Found is still valid.
	abandoned bool
}

// snapshot is how the first agent found the machine.
type snapshot struct {
	BootID string `json:"boot_id"`
	// Sysctls by path below /proc/sys; only those that turning on forwarding changes, and only when it was off.
	Sysctls map[string]string `json:"sysctls"`
}

// withHostState runs fn on the state of this network namespace under a lock that all agents take.
func (n *Network) withHostState(fn func(*hostState) error) error {
	var self unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &self); err != nil {
		return fmt.Errorf("read the own network namespace: %w", err)
	}
	unlock, err := lockDir(n.cfg.SharedDir)
	if err != nil {
		return err
	}
	defer unlock()
	h := &hostState{path: filepath.Join(n.cfg.SharedDir, fmt.Sprintf("netns-%d.json", self.Ino))}
	if data, err := os.ReadFile(h.path); err == nil {
		// A file that cannot be read is replaced.
		_ = json.Unmarshal(data, h)
	}
	if h.Found.BootID != n.bootID {
		h.Found, h.Bridges = snapshot{BootID: n.bootID}, nil
	}
	// An agent without its bridge was killed while it left, or another program removed the bridge.
	before := len(h.Bridges)
	h.Bridges = slices.DeleteFunc(h.Bridges, func(bridge string) bool {
		_, err := netlink.LinkByName(bridge)
		return err != nil && bridge != n.cfg.Bridge
	})
	h.abandoned = before > 0 && len(h.Bridges) == 0
	if err := fn(h); err != nil {
		return err
	}
	if len(h.Bridges) > 0 {
		return nil
	}
	if h.abandoned {
		if err := h.Found.restoreSysctls(); err != nil {
			return err
		}
	}
	if err := os.Remove(h.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return removeLockDir(n.cfg.SharedDir)
}

// join adds an agent. The first one records how it finds the machine.
func (h *hostState) join(bridge string) error {
	if slices.Contains(h.Bridges, bridge) {
		return nil
	}
	if len(h.Bridges) == 0 && !h.abandoned {
		found, err := snapshotHost(h.Found.BootID)
		if err != nil {
			return err
		}
		h.Found = found
	}
	h.Bridges = append(h.Bridges, bridge)
	return h.save()
}

func (h *hostState) save() error { return writeJSON(h.path, h) }

// leave removes an agent. The last one restores the settings.
func (h *hostState) leave(bridge string) error {
	was := len(h.Bridges)
	h.Bridges = slices.DeleteFunc(h.Bridges, func(u string) bool { return u == bridge })
	if len(h.Bridges) > 0 {
		return h.save()
	}
	if was == 0 {
		return nil // nothing was changed
	}
	return h.Found.restoreSysctls()
}

func snapshotHost(bootID string) (snapshot, error) {
	p := snapshot{BootID: bootID, Sysctls: map[string]string{}}
	forwarding, err := readSysctl(ipForward)
	if err != nil {
		return snapshot{}, err
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

// links are the links that existed when forwarding was turned on; none where it was on before.
func (p snapshot) links() []string {
	var links []string
	for name := range p.Sysctls {
		link := filepath.Base(filepath.Dir(name))
		if filepath.Base(name) == "forwarding" && link != "all" && link != "default" && link != "lo" {
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
		return fault.New(fault.Unavailable, codeSysctlRefused, "The node cannot set "+strings.ReplaceAll(name, "/", ".")+
			": the agent needs root and a writable /proc/sys.", err)
	}
	return nil
}

func (p snapshot) restoreSysctls() error {
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

// lockDir makes the directory and locks it until unlock is called.
func lockDir(dir string) (unlock func(), err error) {
	path := filepath.Join(dir, "lock")
	for {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fault.New(fault.Unavailable, fault.CodeDirectoryUnusable, "The agent cannot make its directory "+dir+
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
