package cluster

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Containerd is a containerd with a root, state and socket of its own, without the CRI plugin.
type Containerd struct {
	*Process
	// Dir holds root/ and the configuration; RunDir holds the state and the socket.
	Dir, RunDir string
}

// Address is the path of the socket.
func (c *Containerd) Address() string { return filepath.Join(c.RunDir, "containerd.sock") }

const containerdConfig = `version = 2
root = %q
state = %q
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.aufs", "io.containerd.tracing.processor.v1.otlp"]
[grpc]
  address = %q
`

// SystemContainerd is the socket of the machine's own containerd.
const SystemContainerd = "/run/containerd/containerd.sock"

// Serves reports whether somebody listens on the Unix socket.
func Serves(ctx context.Context, socket string) bool {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return false
	}
	return conn.Close() == nil
}

// PluginDir is where this machine keeps its CNI plugins.
func PluginDir() string {
	for _, d := range []string{"/usr/lib/cni", "/opt/cni/bin"} {
		if _, err := os.Stat(filepath.Join(d, "bridge")); err == nil {
			return d
		}
	}
	return "/usr/lib/cni"
}

// StartContainerd starts a containerd of its own and waits until its socket answers. Dir and runDir are kept when they exist,
// so that it also restarts one that was killed.
func StartContainerd(ctx context.Context, dir, runDir string) (*Containerd, error) {
	for _, d := range []string{dir, runDir} {
		if err := os.MkdirAll(d, 0o711); err != nil {
			return nil, err
		}
	}
	c := &Containerd{Dir: dir, RunDir: runDir}
	config := filepath.Join(dir, "config.toml")
	text := fmt.Sprintf(containerdConfig, filepath.Join(dir, "root"), filepath.Join(runDir, "state"), c.Address())
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return nil, err
	}
	// A socket that a killed daemon left answers nobody, and would look like readiness.
	_ = os.Remove(c.Address())
	_ = os.Remove(c.Address() + ".ttrpc")
	var err error
	c.Process, err = start(ctx, command{
		name: "containerd", path: "containerd", args: []string{"--config", config}, logDir: filepath.Join(dir, "logs"),
	})
	if err != nil {
		return nil, err
	}
	if err := c.awaitSocket(ctx); err != nil {
		_ = c.Kill9()
		return nil, fmt.Errorf("containerd did not answer: %w\n%s", err, c.LogTail(10))
	}
	return c, nil
}

func (c *Containerd) awaitSocket(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", c.Address())
		if err == nil {
			return conn.Close()
		}
		select {
		case <-tick.C:
		case <-c.Exited():
			return fmt.Errorf("it exited: %w", errOr(c.err, err))
		case <-ctx.Done():
			return err
		}
	}
}

// Restart starts a daemon that was stopped or killed again in place.
func (c *Containerd) Restart(ctx context.Context) error {
	again, err := StartContainerd(ctx, c.Dir, c.RunDir)
	if err != nil {
		return err
	}
	c.Process = again.Process
	return nil
}

// Remove ends the daemon and what it started — shims outlive it on purpose — and takes its mounts and directories away.
func (c *Containerd) Remove() error {
	err := c.Stop()
	RemoveContainerd(c.Dir, c.RunDir)
	return err
}

// RemoveContainerd removes what a containerd with these directories left: shims, mounts, files.
func RemoveContainerd(dir, runDir string) {
	for _, pid := range shims(filepath.Join(runDir, "containerd.sock")) {
		if ticks, err := StartTicks(pid); err == nil {
			_ = EndProcess(pid, ticks, 5*time.Second)
		}
	}
	for range 3 { // mounts lie on mounts
		for _, m := range mountsBelow(dir, runDir) {
			_ = syscall.Unmount(m, syscall.MNT_DETACH)
		}
	}
	_ = os.RemoveAll(dir)
	_ = os.RemoveAll(runDir)
}

// shims returns the pids of shims that report to the socket.
func shims(address string) []int {
	var pids []int
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		var pid int
		if _, err := fmt.Sscanf(e.Name(), "%d", &pid); err != nil {
			continue
		}
		cmdline, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		if err != nil {
			continue
		}
		args := strings.Split(string(cmdline), "\x00")
		if !strings.Contains(args[0], "containerd-shim") {
			continue
		}
		for i, a := range args {
			if a == "-address" && i+1 < len(args) && args[i+1] == address {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// mountsBelow returns the mount points below the directories, deepest first.
func mountsBelow(dirs ...string) []string {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil
	}
	var found []string
	lines := strings.Split(string(data), "\n")
	for _, line := range slices.Backward(lines) {
		f := strings.Fields(line)
		if len(f) < 5 {
			continue
		}
		for _, d := range dirs {
			if strings.HasPrefix(f[4], d+"/") {
				found = append(found, f[4])
			}
		}
	}
	return found
}
