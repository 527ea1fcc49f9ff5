package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/netnamespace"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
)

// cleanupTimeout bounds the clean-up after a failed Setup.
const cleanupTimeout = 60 * time.Second

func (n *Network) netnsPath(id string) string { return filepath.Join(n.nsDir(), id+".net") }

func (n *Network) usernsPath(id string) string {
	return filepath.Join(n.nsDir(), id+".user")
}

// makeNamespaces makes the service's network namespace and the user namespace that owns it, and mounts both so that
// they stay. They belong to a child that only waits: a user namespace's map is written from outside, and a process with
// several threads, such as this one, cannot enter any.
func (n *Network) makeNamespaces(ctx context.Context, id string, ip netip.Addr) error {
	holder := exec.CommandContext(ctx, "cat")
	holder.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	paths := map[string]string{"net": n.netnsPath(id)}
	if n.cfg.UIDMapSize > 0 {
		ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: int(n.cfg.UIDMapBase), Size: int(n.cfg.UIDMapSize)}}
		holder.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		holder.SysProcAttr.UidMappings, holder.SysProcAttr.GidMappings = ids, ids
		// Entry points that step down to a service user call setgroups.
		holder.SysProcAttr.GidMappingsEnableSetgroups = true
		paths["user"] = n.usernsPath(id)
	}
	// The child ends when this pipe closes, also if the agent dies.
	stdin, err := holder.StdinPipe()
	if err != nil {
		return err
	}
	start := holder.Start
	if n.cfg.UIDMapSize > 0 {
		start = func() error { return asOwner(ownerOf(ip), holder.Start) }
	}
	if err := start(); err != nil {
		return fmt.Errorf("make namespaces: %w", err)
	}
	defer func() {
		// The child has no state; killing it is cheaper than letting it end.
		_ = holder.Process.Kill()
		_ = stdin.Close()
		_ = holder.Wait()
	}()
	for kind, path := range paths {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			return err
		}
		if err := unix.Mount(fmt.Sprintf("/proc/%d/ns/%s", holder.Process.Pid, kind), path, "", unix.MS_BIND,
			""); err != nil {
			return fmt.Errorf("keep the %s namespace: %w", kind, err)
		}
		failpoint.Hit("agent/attach/namespace_mounted")
	}
	return nil
}

// hasNamespace reports whether the attachment's network namespace is mounted, and not only the file it was mounted on.
func (n *Network) hasNamespace(id string) bool {
	var st unix.Statfs_t
	return unix.Statfs(n.netnsPath(id), &st) == nil && st.Type == unix.NSFS_MAGIC
}

// isAttached reports whether a network that was ready still is: its namespaces, its address, its link on the bridge.
func (n *Network) isAttached(id string, r record) bool {
	if !n.hasNamespace(id) {
		return false
	}
	host, err := netlink.LinkByName(n.hostLink(id))
	if err != nil {
		return false
	}
	bridge, err := netlink.LinkByName(n.cfg.Bridge)
	if err != nil || host.Attrs().MasterIndex != bridge.Attrs().Index {
		return false
	}
	err = netnamespace.Run(n.netnsPath(id), func() error {
		link, err := netlink.LinkByName(memberLink)
		if err != nil {
			return err
		}
		addrs, err := netnamespace.List(func() ([]netlink.Addr, error) { return netlink.AddrList(link, netlink.FAMILY_V4) })
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(addrs, func(a netlink.Addr) bool { return a.IP.Equal(r.IP.AsSlice()) }) {
			return errors.New("the address is gone")
		}
		return nil
	})
	return err == nil
}

func (n *Network) removeNamespaces(id string) error {
	for _, path := range []string{n.netnsPath(id), n.usernsPath(id)} {
		for {
			err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
			if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
				break
			}
			if err != nil {
				return fmt.Errorf("unmount %s: %w", path, err)
			}
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}
