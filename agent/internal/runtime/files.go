package runtime

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"golang.org/x/sys/unix"
)

// tempMounts is where containerd's client mounts snapshots for a short time; a crash may leave one mounted.
const tempMounts = ".mnt"

// useOwnTempMounts keeps those mounts out of the shared /tmp, and removes those that an earlier process left.
func useOwnTempMounts(cfg Config) error {
	dir := filepath.Join(cfg.StateDir, tempMounts)
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return directoryFault(dir, err)
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if err := unmountAll(path); err != nil {
			return fmt.Errorf("unmount %s: %w", path, err)
		}
		if err := os.Remove(path); err != nil {
			return directoryFault(path, err)
		}
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return directoryFault(dir, err)
	}
	return mount.SetTempMountLocation(dir)
}

func (r *Runtime) files(id string) files {
	dir := filepath.Join(r.cfg.StateDir, id)
	return files{
		dir: dir, hosts: filepath.Join(dir, "hosts"), hostname: filepath.Join(dir, "hostname"),
		resolvConf: filepath.Join(dir, "resolv.conf"), configDir: filepath.Join(dir, "config"),
		devices: filepath.Join(r.cfg.DeviceDir, id),
	}
}

// prepareFiles writes the files that are bound into the container.
func (r *Runtime) prepareFiles(spec Spec) error {
	f := r.files(spec.ID)
	if err := os.MkdirAll(f.dir, 0o711); err != nil { //nolint:gosec // a remapped container's root must walk through it
		return directoryFault(f.dir, err)
	}
	for path, text := range map[string]string{
		f.hostname:   spec.hostname() + "\n",
		f.resolvConf: resolvConf(r.cfg.ResolvConf),
	} {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil { //nolint:gosec // read inside the container
			return directoryFault(path, err)
		}
	}
	if c := spec.Service.GetConfig(); c != nil {
		if err := writeConfig(f.configDir, c.GetJson()); err != nil {
			return err
		}
	}
	if err := r.makeNodes(spec); err != nil {
		return err
	}
	return r.writeHosts(spec)
}

// writeHosts writes the container's /etc/hosts, in place: the file may be bound into the container already.
func (r *Runtime) writeHosts(spec Spec) error {
	hosts := "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
	if spec.IP != "" {
		hosts += spec.IP + "\t" + spec.hostname() + "\n"
	}
	path := r.files(spec.ID).hosts
	if err := os.WriteFile(path, []byte(hosts), 0o644); err != nil { //nolint:gosec // read inside the container
		return directoryFault(path, err)
	}
	return nil
}

// resolvedConf names the real servers where systemd-resolved answers on an address that a container cannot reach.
const resolvedConf = "/run/systemd/resolve/resolv.conf"

// resolvConf is the host's resolver configuration without servers on a loopback address.
func resolvConf(path string) string {
	for _, p := range []string{path, resolvedConf} {
		data, err := os.ReadFile(p)
		if err != nil {
			continue
		}
		var keep []string
		servers := 0
		for line := range strings.Lines(string(data)) {
			f := strings.Fields(line)
			if len(f) == 0 || strings.HasPrefix(f[0], "#") || strings.HasPrefix(f[0], ";") {
				continue
			}
			if f[0] == "nameserver" {
				if len(f) < 2 {
					continue
				}
				if addr, err := netip.ParseAddr(f[1]); err != nil || addr.IsLoopback() {
					continue
				}
				f = f[:2]
				servers++
			}
			keep = append(keep, strings.Join(f, " "))
		}
		if servers > 0 {
			return strings.Join(keep, "\n") + "\n"
		}
	}
	return ""
}

// Resolvers are the name servers of containers.
func (r *Runtime) Resolvers() []netip.Addr {
	var servers []netip.Addr
	for line := range strings.Lines(resolvConf(r.cfg.ResolvConf)) {
		if name, text, _ := strings.Cut(strings.TrimSpace(line), " "); name == "nameserver" {
			if addr, err := netip.ParseAddr(text); err == nil {
				servers = append(servers, addr)
			}
		}
	}
	return servers
}

// unmountAll unmounts everything that is mounted on path.
func unmountAll(path string) error {
	for {
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		switch {
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT):
			return nil
		case err != nil:
			return err
		}
	}
}

// noteStart writes the time of the start beside the container's files; containerd does not keep it. The file need not
// be synced: a crash of the machine ends the container as well.
func (r *Runtime) noteStart(id string, at time.Time) error {
	path := filepath.Join(r.files(id).dir, "started")
	if err := os.WriteFile(path+".new", strconv.AppendInt(nil, at.UnixNano(), 10), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func (r *Runtime) startedAt(id string) time.Time {
	data, err := os.ReadFile(filepath.Join(r.files(id).dir, "started"))
	if err != nil {
		return time.Time{}
	}
	nanos, err := strconv.ParseInt(string(data), 10, 64)
	if err != nil {
		return time.Time{}
	}
	return time.Unix(0, nanos)
}
