// Package containerdtest runs a real containerd of a test's own: own root, state, socket and configuration, without
// CRI. It can be killed and started again, and leaves nothing behind, not even after the test killed things in the
// middle. It knows nothing of what runs inside.
package containerdtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"golang.org/x/sys/unix"
)

const (
	// startWithin bounds how long containerd may take to serve.
	startWithin = 60 * time.Second
	// endWithin bounds how long a killed process may take to go.
	endWithin = 20 * time.Second
	// namePrefix is followed by the id of the owning process, so that a later run can clean up after one that was killed.
	namePrefix = "ctrd-"
)

// Daemon is one containerd.
type Daemon struct {
	// Dir holds everything of it.
	Dir string
	// Address is the path of its socket.
	Address string
	// Outlives lets the daemon go on when the process that started it ends.
	Outlives bool

	mu   sync.Mutex
	pid  int
	gone chan struct{} // closed when the process has ended
}

// Start runs a containerd for this test and cleans up at its end.
func Start(t testing.TB) *Daemon {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("containerd needs root")
	}
	sweep(t)
	//nolint:usetesting // short, and swept by later runs
	dir, err := os.MkdirTemp("", fmt.Sprintf("%s%d-", namePrefix, os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	d, err := New(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("containerd's log:\n%s", d.LogTail())
		}
		if err := d.Destroy(); err != nil {
			t.Errorf("clean up containerd in %s: %v", dir, err)
		}
	})
	if err := d.Start(t.Context()); err != nil {
		t.Fatalf("start containerd: %v\n%s", err, d.LogTail())
	}
	return d
}

// sweep cleans up after test processes that were killed before they could.
func sweep(t testing.TB) {
	dirs, _ := filepath.Glob(filepath.Join(os.TempDir(), namePrefix+"*-*"))
	for _, dir := range dirs {
		var pid int
		if _, err := fmt.Sscanf(filepath.Base(dir), namePrefix+"%d-", &pid); err != nil || pid == os.Getpid() ||
			unix.Kill(pid, 0) == nil {
			continue
		}
		if err := (&Daemon{Dir: dir, Address: filepath.Join(dir, "s.sock")}).Destroy(); err != nil {
			t.Logf("clean up %s of an earlier run: %v", dir, err)
		}
	}
}

// New writes the configuration of a containerd that lives in dir, a short path, because the socket's name has a limit.
func New(dir string) (*Daemon, error) {
	d := &Daemon{Dir: dir, Address: filepath.Join(dir, "s.sock")}
	config := fmt.Sprintf(`version = 2
root = %q
state = %q
disabled_plugins = [
  "io.containerd.grpc.v1.cri", "io.containerd.internal.v1.restart", "io.containerd.tracing.processor.v1.otlp", `+
		`"io.containerd.internal.v1.tracing",
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", `+
		`"io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
]
[grpc]
  address = %q
[plugins."io.containerd.internal.v1.opt"]
  path = %q
`, filepath.Join(dir, "root"), d.stateDir(), d.Address, filepath.Join(dir, "opt"))
	// A remapped container's root user must be able to walk to its root file system.
	if err := os.Chmod(dir, 0o711); err != nil {
		return nil, err
	}
	if _, err := os.Stat(d.born()); errors.Is(err, fs.ErrNotExist) {
		if err := os.WriteFile(d.born(), nil, 0o600); err != nil {
			return nil, err
		}
	}
	return d, os.WriteFile(filepath.Join(dir, "config.toml"), []byte(config), 0o600)
}

// born is a file that is as old as the first daemon in the directory.
func (d *Daemon) born() string { return filepath.Join(d.Dir, "born") }

func (d *Daemon) stateDir() string { return filepath.Join(d.Dir, "state") }

// Start runs the daemon, unless it runs already, and waits until it serves.
func (d *Daemon) Start(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.runs() {
		return d.waitUntilServing(ctx)
	}
	logFile, err := os.OpenFile(filepath.Join(d.Dir, "containerd.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = logFile.Close() }()
	started, gone := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(gone)
		// The daemon dies with the thread that started it, so this one is kept until the daemon has ended: a test process
		// that is killed leaves no daemon.
		runtime.LockOSThread()
		cmd := exec.Command("containerd", "--log-level", "warn", "--config", filepath.Join(d.Dir, "config.toml"))
		cmd.Stdout, cmd.Stderr = logFile, logFile
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
		if d.Outlives {
			cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		}
		err := cmd.Start()
		if err == nil {
			d.pid = cmd.Process.Pid
		}
		started <- err
		if err == nil {
			_ = cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		return err
	}
	d.gone = gone
	return d.waitUntilServing(ctx)
}

// runs reports whether the daemon was started and has not ended. The mutex is held.
func (d *Daemon) runs() bool {
	if d.pid == 0 {
		return false
	}
	select {
	case <-d.gone:
		return false
	default:
		return true
	}
}

func (d *Daemon) waitUntilServing(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	for {
		err := d.ask(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("containerd does not serve: %w", err)
		case <-d.gone:
			return errors.New("containerd ended by itself")
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (d *Daemon) ask(ctx context.Context) error {
	if _, err := os.Stat(d.Address); err != nil {
		return err
	}
	c, err := client.New(d.Address, client.WithTimeout(time.Second))
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	serving, err := c.IsServing(ctx)
	if err == nil && !serving {
		err = errors.New("not serving yet")
	}
	return err
}

// PID is the process id of the daemon.
func (d *Daemon) PID() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.pid
}

// Exited is closed when the daemon has ended; nil before its first start.
func (d *Daemon) Exited() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.gone
}

// Kill9 kills the daemon, not its shims, and waits until it is gone.
func (d *Daemon) Kill9() error { return d.end(unix.SIGKILL) }

// Stop asks the daemon to end, as systemd would, and waits until it is gone. Its shims stay.
func (d *Daemon) Stop() error { return d.end(unix.SIGTERM) }

func (d *Daemon) end(sig unix.Signal) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.runs() {
		d.pid = 0
		return nil
	}
	if err := unix.Kill(d.pid, sig); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	select {
	case <-d.gone:
		d.pid = 0
		return nil
	case <-time.After(endWithin):
		return fmt.Errorf("containerd %d did not end after %v", d.pid, sig)
	}
}

// Client connects to the daemon; the connection ends with the test.
func (d *Daemon) Client(t testing.TB) *client.Client {
	t.Helper()
	c, err := client.New(d.Address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// maxLogTail bounds how much of the daemon's log is shown.
const maxLogTail = 8 << 10

// LogTail is the end of the daemon's log.
func (d *Daemon) LogTail() string {
	data, _ := os.ReadFile(filepath.Join(d.Dir, "containerd.log"))
	return string(data[max(0, len(data)-maxLogTail):])
}

// Destroy ends the daemon and everything it started, and removes all traces. It works without a running daemon.
func (d *Daemon) Destroy() error {
	var errs []error
	errs = append(errs, d.end(unix.SIGKILL))
	shims, containers := d.Shims(), d.containerProcesses()
	cgroups := cgroupsOf(containers)
	for _, pid := range append(containers, shims...) {
		errs = append(errs, killAndWait(pid))
	}
	errs = append(errs, d.removeShimSockets(), d.unmountAll())
	removeCgroups(cgroups)
	errs = append(errs, os.RemoveAll(d.Dir))
	// These belong to every containerd on the machine; they go with whoever is last, and only while they are empty.
	for _, dir := range []string{"/run/containerd/s", "/run/containerd/fifo", "/run/containerd/runc", "/run/containerd"} {
		_ = os.Remove(dir)
	}
	return errors.Join(errs...)
}

// Shims are the process ids of the shims that this daemon started, whether it lives or not.
func (d *Daemon) Shims() []int {
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
func (d *Daemon) containerProcesses() []int {
	var pids []int
	names, _ := filepath.Glob(filepath.Join(d.stateDir(), "io.containerd.runtime.v2.task", "*", "*", "init.pid"))
	for _, name := range names {
		data, _ := os.ReadFile(name)
		var pid int
		if _, err := fmt.Sscanf(string(data), "%d", &pid); err != nil || pid <= 1 {
			continue
		}
		// The id may meanwhile be another's: only a process in the container's cgroup is meant.
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

func killAndWait(pid int) error {
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		return nil //nolint:nilerr // it has ended already
	}
	deadline := time.Now().Add(endWithin)
	for time.Now().Before(deadline) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil || bytes.Contains(stat, []byte(") Z ")) {
			return nil //nolint:nilerr // no such process any more
		}
		time.Sleep(5 * time.Millisecond)
	}
	return fmt.Errorf("process %d does not end", pid)
}

// removeShimSockets removes the sockets of shims, which live outside the daemon's own directories.
func (d *Daemon) removeShimSockets() error {
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

// removeForgottenSockets removes the sockets of shims that the daemon was killed over while it started them, and of
// which it wrote nothing down: those that came after it and that nobody listens on.
func (d *Daemon) removeForgottenSockets() error {
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
func (d *Daemon) unmountAll() error {
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
