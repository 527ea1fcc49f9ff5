package devcluster

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Destroy ends the daemon and everything it started, and removes all traces. It works without a running daemon.
func (d *Containerd) Destroy() error {
	var errs []error
	errs = append(errs, d.end(unix.SIGKILL))
	shims, containers := d.Shims(), d.containerProcesses()
	cgroups := cgroupsOf(containers)
	for _, pid := range append(containers, shims...) {
		errs = append(errs, endNow(pid))
	}
	errs = append(errs, d.removeShimSockets(), d.unmountAll())
	removeCgroups(cgroups)
	errs = append(errs, os.RemoveAll(d.Dir))
	// All containerds of the machine share these directories; the last one removes them.
	for _, dir := range []string{"/run/containerd/s", "/run/containerd/fifo", "/run/containerd/runc", "/run/containerd"} {
		_ = os.Remove(dir)
	}
	return errors.Join(errs...)
}

// Shims are the process ids of the shims that this daemon started, whether it lives or not.
func (d *Containerd) Shims() []int {
	var pids []int
	names, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil || !bytes.Contains(data, []byte("containerd-shim")) || !bytes.Contains(data,
			[]byte("\x00-address\x00"+d.Address+"\x00")) {
			continue
		}
		var pid int
		if _, err := fmt.Sscanf(name, "/proc/%d/cmdline", &pid); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// containerProcesses are the first processes of the containers, by the file that runc writes into the bundle.
func (d *Containerd) containerProcesses() []int {
	var pids []int
	names, _ := filepath.Glob(filepath.Join(d.stateDir(), "io.containerd.runtime.v2.task", "*", "*", "init.pid"))
	for _, name := range names {
		data, _ := os.ReadFile(name)
		var pid int
		if _, err := fmt.Sscanf(string(data), "%d", &pid); err != nil || pid <= 1 {
			continue
		}
		// The id may be another process's now: only one in the container's cgroup counts.
		id := filepath.Base(filepath.Dir(name))
		if cgroup, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid)); err == nil && bytes.Contains(cgroup, []byte(id)) {
			pids = append(pids, pid)
		}
	}
	return pids
}

func cgroupsOf(pids []int) map[string]bool {
	paths := map[string]bool{}
	for _, pid := range pids {
		data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		for line := range strings.Lines(string(data)) {
			if parts := strings.SplitN(strings.TrimSpace(line), ":", 3); len(parts) == 3 && parts[2] != "/" {
				paths[parts[2]] = true
			}
		}
	}
	return paths
}

// removeCgroups removes the empty cgroups of these paths in every hierarchy, and the parents that are empty then.
func removeCgroups(paths map[string]bool) {
	for path := range paths {
		for p := path; p != "/" && p != "."; p = filepath.Dir(p) {
			dirs, _ := filepath.Glob("/sys/fs/cgroup/*" + p)
			for _, dir := range append(dirs, "/sys/fs/cgroup"+p) {
				_ = unix.Rmdir(dir)
			}
		}
	}
}

// endNow ends a process with SIGKILL, if it still runs.
func endNow(pid int) error {
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil // it has ended already
	}
	defer func() { _ = unix.Close(pidfd) }()
	return killAndWait(pid, pidfd)
}

// removeShimSockets removes the sockets of shims, which live outside the daemon's own directories.
func (d *Containerd) removeShimSockets() error {
	names, _ := filepath.Glob(filepath.Join(d.stateDir(), "io.containerd.runtime.v2.task", "*", "*", "address"))
	var errs []error
	for _, name := range names {
		data, _ := os.ReadFile(name)
		socket, ok := strings.CutPrefix(strings.TrimSpace(string(data)), "unix://")
		if !ok {
			continue
		}
		if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(append(errs, d.removeForgottenSockets())...)
}

// removeForgottenSockets removes sockets of shims that the daemon had started but not recorded when it was killed:
// those that are newer than the daemon and have no listener.
func (d *Containerd) removeForgottenSockets() error {
	began, err := os.Stat(d.born())
	if err != nil {
		return nil //nolint:nilerr // it never was
	}
	names, _ := filepath.Glob("/run/containerd/s/*")
	var errs []error
	for _, name := range names {
		if info, err := os.Stat(name); err != nil || info.Mode().Type() != fs.ModeSocket ||
			info.ModTime().Before(began.ModTime()) {
			continue
		}
		conn, err := net.Dial("unix", name)
		if err == nil {
			errs = append(errs, conn.Close())
			continue
		}
		if errors.Is(err, unix.ECONNREFUSED) {
			if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

// unmountAll unmounts what is mounted below the daemon's directory, the latest first.
func (d *Containerd) unmountAll() error {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	var points []string
	for line := range strings.Lines(string(data)) {
		if fields := strings.Fields(line); len(fields) > 4 && strings.HasPrefix(fields[4], d.Dir+"/") {
			points = append(points, fields[4])
		}
	}
	var errs []error
	for _, point := range slices.Backward(points) {
		errs = append(errs, unix.Unmount(point, unix.MNT_DETACH))
	}
	return errors.Join(errs...)
}
