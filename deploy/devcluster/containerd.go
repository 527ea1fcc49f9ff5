package devcluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/client"
	"golang.org/x/sys/unix"
)

// SystemContainerd is the socket of the machine's own containerd.
const SystemContainerd = "/run/containerd/containerd.sock"

const (
	// startWithin bounds how long containerd may take to serve.
	startWithin = 60 * time.Second
	// endWithin bounds how long a killed process may take to go.
	endWithin = 20 * time.Second
)

// Containerd is a containerd with its own root, state, socket and configuration below one directory, and without CRI.
// It can be killed and started again; Destroy leaves nothing behind, even when the daemon was killed at work.
type Containerd struct {
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

// StartContainerd starts a containerd and waits until it serves. It takes over what an earlier one left in the
// directory. It outlives the caller until it is stopped; Destroy removes all of it.
func StartContainerd(ctx context.Context, dir string) (*Containerd, error) {
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return nil, err
	}
	d, err := NewContainerd(dir)
	if err != nil {
		return nil, err
	}
	d.Outlives = true
	return d, d.Start(ctx)
}

// NewContainerd writes the configuration of a containerd that lives in dir, a short path, because the socket's name has
// a limit. An earlier process may have started it there.
func NewContainerd(dir string) (*Containerd, error) {
	d := &Containerd{Dir: dir, Address: filepath.Join(dir, "s.sock")}
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
func (d *Containerd) born() string { return filepath.Join(d.Dir, "born") }

func (d *Containerd) stateDir() string { return filepath.Join(d.Dir, "state") }

// Start runs the daemon, unless it runs already, and waits until it serves.
func (d *Containerd) Start(ctx context.Context) error {
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
func (d *Containerd) runs() bool {
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

func (d *Containerd) waitUntilServing(ctx context.Context) error {
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

func (d *Containerd) ask(ctx context.Context) error {
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
func (d *Containerd) PID() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.pid
}

// Exited is closed when the daemon has ended; nil before its first start.
func (d *Containerd) Exited() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.gone
}

// Kill9 kills the daemon, not its shims, and waits until it is gone.
func (d *Containerd) Kill9() error { return d.end(unix.SIGKILL) }

// Stop asks the daemon to end, as systemd would, and waits until it is gone. Its shims stay.
func (d *Containerd) Stop() error { return d.end(unix.SIGTERM) }

func (d *Containerd) end(sig unix.Signal) error {
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

// maxLogTail bounds how much of the daemon's log is shown.
const maxLogTail = 8 << 10

// LogTail is the end of the daemon's log.
func (d *Containerd) LogTail() string {
	data, _ := os.ReadFile(filepath.Join(d.Dir, "containerd.log"))
	return string(data[max(0, len(data)-maxLogTail):])
}

// Serves reports whether a process listens on the Unix socket.
func Serves(ctx context.Context, socket string) bool {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return false
	}
	return conn.Close() == nil
}
