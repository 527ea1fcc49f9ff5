package cluster

import (
	"context"
	"net"
	"os"
	"path/filepath"

	"github.com/gpuaas/gpuaas/e2e/containerdtest"
)

// SystemContainerd is the socket of the machine's own containerd.
const SystemContainerd = "/run/containerd/containerd.sock"

// Containerd is a containerd with everything of its own below one directory.
type Containerd = containerdtest.Daemon

// StartContainerd starts a containerd of its own and waits until it serves. What an earlier one left in the directory
// is taken up again. It outlives the caller until it is stopped; Destroy removes all of it.
func StartContainerd(ctx context.Context, dir string) (*Containerd, error) {
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return nil, err
	}
	d, err := containerdtest.New(dir)
	if err != nil {
		return nil, err
	}
	d.Outlives = true
	return d, d.Start(ctx)
}

// FormerContainerd names the containerd that an earlier program started in the directory, for Destroy.
func FormerContainerd(dir string) (*Containerd, error) { return containerdtest.New(dir) }

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
