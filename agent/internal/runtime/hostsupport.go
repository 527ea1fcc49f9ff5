package runtime

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"

	"github.com/containerd/containerd/v2/client"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// hostSupport is what the kernel and containerd can give to containers.
type hostSupport struct {
	userNamespaces bool
	seccomp        bool
	swapLimit      bool
	cgroupV2       bool
	// cgroupRoot is where the hierarchies are mounted.
	cgroupRoot string
	// contentRoot is where containerd keeps unpacked images.
	contentRoot string
}

// Words for what a host cannot give; the node reports them.
const (
	ConditionNoUserNamespaces = "user_namespaces_unavailable"
	ConditionNoSeccomp        = "seccomp_unavailable"
	ConditionNoSwapLimit      = "swap_limit_unavailable"
)

func (h hostSupport) conditions() []string {
	var c []string
	if !h.userNamespaces {
		c = append(c, ConditionNoUserNamespaces)
	}
	if !h.seccomp {
		c = append(c, ConditionNoSeccomp)
	}
	if !h.swapLimit {
		c = append(c, ConditionNoSwapLimit)
	}
	return c
}

func lookAtHost(ctx context.Context, c *client.Client, cfg Config) (hostSupport, error) {
	plugins, err := c.IntrospectionService().Plugins(ctx)
	if err != nil {
		return hostSupport{}, unavailable(cfg.Address, err)
	}
	found, root := false, ""
	for _, p := range plugins.GetPlugins() {
		if p.GetType() == "io.containerd.snapshotter.v1" && p.GetID() == cfg.Snapshotter {
			found = p.GetInitErr() == nil
			root = p.GetExports()["root"]
		}
	}
	if !found {
		return hostSupport{}, fault.New(fault.Unavailable, "snapshotter_unavailable",
			fmt.Sprintf("containerd cannot use its snapshotter %s: look for it in `ctr plugins ls`; the overlay kernel module may be missing.", cfg.Snapshotter), nil)
	}
	h := hostSupport{seccomp: hasSeccomp(), contentRoot: root, cgroupRoot: "/sys/fs/cgroup"}
	_, err = os.Stat(h.cgroupRoot + "/cgroup.controllers")
	h.cgroupV2 = err == nil
	h.swapLimit = h.cgroupV2
	if _, err := os.Stat(h.cgroupRoot + "/memory/memory.memsw.limit_in_bytes"); err == nil {
		h.swapLimit = true
	}
	if !cfg.NoUserNamespaces {
		err := tryUserNamespace(ctx, cfg)
		h.userNamespaces = err == nil
		if err != nil {
			cfg.Log.Warn("containers run without user namespaces: this host does not give them", "cause", err)
		}
	}
	return h, nil
}

// tryUserNamespace makes one, as a container would.
func tryUserNamespace(ctx context.Context, cfg Config) error {
	cmd := exec.CommandContext(ctx, "/bin/true")
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: int(cfg.UIDMapBase), Size: int(cfg.UIDMapSize)}}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids}
	return cmd.Run()
}

// hasSeccomp looks at this process's own status: the line is there when the kernel filters system calls.
func hasSeccomp() bool {
	status, err := os.ReadFile("/proc/self/status")
	return err == nil && strings.Contains(string(status), "\nSeccomp:")
}

// Version asks containerd and runc what they are.
func (r *Runtime) Version(ctx context.Context) (Version, error) {
	v, err := r.client.Version(r.ns(ctx))
	if err != nil {
		return Version{}, unavailable(r.cfg.Address, err)
	}
	out, err := exec.CommandContext(ctx, "runc", "--version").Output()
	if err != nil {
		return Version{}, fault.New(fault.Unavailable, "runc_unavailable", "runc cannot be run: install it (apt-get install runc).", err)
	}
	first, _, _ := strings.Cut(string(out), "\n")
	return Version{Containerd: v.Version, Runc: strings.TrimPrefix(first, "runc version ")}, nil
}
