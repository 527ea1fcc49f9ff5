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

	"github.com/gpuaas/gpuaas/agent/internal/mountpoint"
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
		if err := mountpoint.Unmount(path); err != nil {
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
		devices:    filepath.Join(r.cfg.DeviceDir, id),
		secretsDir: filepath.Join(dir, "secrets"),
	}
}

// prepareFiles writes the files that are bound into the container.
func (r *Runtime) prepareFiles(spec Spec) error {
	f := r.files(spec.ID)
	if err := makeDir(f.dir, 0o711); err != nil { // a remapped container's root must walk through it
		return err
	}
	for path, text := range map[string]string{
		f.hostname:   spec.hostname() + "\n",
		f.resolvConf: resolvConf(r.cfg.ResolvConf),
	} {
		if err := writeFile(path, []byte(text), 0o644); err != nil {
			return err
		}
	}
	if c := spec.Service.GetConfig(); c != nil {
		if err := writeConfig(f.configDir, c.GetJson()); err != nil {
			return err
		}
	}
	if err := writeSecrets(f.secretsDir, spec.Secrets); err != nil {
		return err
	}
	for i, file := range spec.Service.GetFiles() {
		if err := writeFile(f.publisherFile(i), []byte(file.GetContent()), os.FileMode(file.GetMode())); err != nil {
			return err
		}
	}
	if err := r.makeNodes(spec); err != nil {
		return err
	}
	return r.writeHosts(spec)
}

// UpdateHosts tells a running container the addresses of its peers.
func (r *Runtime) UpdateHosts(spec Spec) error {
	if _, err := os.Stat(r.files(spec.ID).hosts); errors.Is(err, fs.ErrNotExist) {
		return nil // the container is gone
	}
	return r.writeHosts(spec)
}

// writeHosts writes the container's /etc/hosts, in place: the file may be bound into the container already.
func (r *Runtime) writeHosts(spec Spec) error {
	lines := []string{"127.0.0.1\tlocalhost", "::1\tlocalhost ip6-localhost ip6-loopback"}
	if spec.IP != "" {
		own := append([]string{spec.hostname()}, NamesOf(spec.Service)...)
		lines = append(lines, spec.IP+"\t"+strings.Join(own, " "))
	}
	for _, p := range spec.Peers {
		lines = append(lines, p.IP+"\t"+strings.Join(p.Names, " "))
	}
	return writeFile(r.files(spec.ID).hosts, []byte(strings.Join(lines, "\n")+"\n"), 0o644)
}

// makeDir makes a directory that a container's user reaches, whatever mask of file modes the agent's unit has.
func makeDir(path string, mode fs.FileMode) error {
	err := os.MkdirAll(path, mode)
	if err == nil {
		err = os.Chmod(path, mode)
	}
	if err != nil {
		return directoryFault(path, err)
	}
	return nil
}

// writeFile writes a file that a container's user reads, whatever mask of file modes the agent's unit has.
func writeFile(path string, data []byte, mode fs.FileMode) error {
	err := os.WriteFile(path, data, mode)
	if err == nil {
		err = os.Chmod(path, mode)
	}
	if err != nil {
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

// The files beside a container's own that hold a time: of the call that started it, and of the answer.
const (
	startCalledFile = "start-called"
	startedFile     = "started"
)

// noteTime writes a time beside the container's files; containerd does not keep it. The file need not be synced: a
// crash of the machine ends the container as well.
func (r *Runtime) noteTime(id, name string, at time.Time) error {
	path := filepath.Join(r.files(id).dir, name)
	if err := os.WriteFile(path+".new", strconv.AppendInt(nil, at.UnixNano(), 10), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// notedTime is zero where no time was noted.
func (r *Runtime) notedTime(id, name string) time.Time {
	data, err := os.ReadFile(filepath.Join(r.files(id).dir, name))
	if err != nil {
		return time.Time{}
	}
	nanos, err := strconv.ParseInt(string(data), 10, 64)
	if err != nil {
		return time.Time{}
	}
	return time.Unix(0, nanos)
}
