package runtime

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"syscall"

	"github.com/containerd/containerd/v2/client"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// hostSupport is what the kernel and containerd can give to containers.
type hostSupport struct {
	userNamespaces bool
	seccomp        bool
	swapLimit      bool
	// appArmor is the profile of containers; empty where the kernel has none for them.
	appArmor string
	// resourceLimits says that root here may set those of processes in user namespaces that others have made.
	resourceLimits bool
	cgroupV2       bool
	// cgroupRoot is where the hierarchies are mounted.
	cgroupRoot string
	// contentRoot is where containerd keeps unpacked images.
	contentRoot string
	// sharedDisk says that containers write to the file system on which the agent keeps what it has measured.
	sharedDisk bool
}

func (h hostSupport) conditions() []string {
	var c []string
	if !h.userNamespaces {
		c = append(c, protocol.ConditionNoUserNamespaces)
	}
	if !h.seccomp {
		c = append(c, protocol.ConditionNoSeccomp)
	}
	if !h.swapLimit {
		c = append(c, protocol.ConditionNoSwapLimit)
	}
	if h.appArmor == "" {
		c = append(c, protocol.ConditionNoAppArmor)
	}
	if h.sharedDisk {
		c = append(c, protocol.ConditionSharedDisk)
	}
	if !h.resourceLimits {
		c = append(c, protocol.ConditionNoCoreLimit)
	}
	return c
}

// detectHost takes the outcome of making a user namespace, which was begun earlier.
func detectHost(ctx context.Context, c *client.Client, cfg Config, userNamespace <-chan error) (hostSupport, error) {
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
		return hostSupport{}, fault.New(fault.Unavailable, codeSnapshotterUnavailable,
			fmt.Sprintf("containerd cannot use its snapshotter %s: look for it in `ctr plugins ls`; the overlay kernel module "+
				"may be missing.", cfg.Snapshotter), nil)
	}
	h := hostSupport{
		seccomp: hasSeccomp(cfg.ProcDir), resourceLimits: hasCapability(unix.CAP_SYS_RESOURCE), contentRoot: root,
		cgroupRoot: "/sys/fs/cgroup",
	}
	h.sharedDisk = sameFileSystem(root, cfg.LogDir)
	_, err = os.Stat(h.cgroupRoot + "/cgroup.controllers")
	h.cgroupV2 = err == nil
	h.swapLimit = h.cgroupV2
	if _, err := os.Stat(h.cgroupRoot + "/memory/memory.memsw.limit_in_bytes"); err == nil {
		h.swapLimit = true
	}
	if !cfg.NoUserNamespaces {
		if err := <-userNamespace; err != nil {
			return hostSupport{}, fault.New(fault.Unavailable, codeNoUserNamespaces,
				"This host gives containers no user namespaces (sysctl user.max_user_namespaces): their root would be the host's "+
					"root. "+
					"Run the agent with --no-user-namespaces if that is what you want.", err).Permanent()
		}
		h.userNamespaces = true
	}
	if !h.seccomp && !cfg.NoSeccomp {
		return hostSupport{}, fault.New(fault.Unavailable, codeNoSeccomp,
			"This host's kernel cannot filter the system calls of containers (CONFIG_SECCOMP_FILTER). "+
				"Run the agent with --no-seccomp if you want to run them unfiltered.", nil).Permanent()
	}
	h.seccomp = h.seccomp && !cfg.NoSeccomp
	switch loaded, err := cfg.LoadAppArmor(cfg.profileName()); {
	case err != nil:
		cfg.Log.Warn("cannot load an AppArmor profile; containers run without one",
			slog.String("profile", cfg.profileName()), slog.Any("error", err))
	case loaded:
		h.appArmor = cfg.profileName()
	}
	return h, nil
}

func sameFileSystem(a, b string) bool {
	var one, other unix.Stat_t
	return unix.Stat(a, &one) == nil && unix.Stat(b, &other) == nil && one.Dev == other.Dev
}

// tryUserNamespace makes one, as a container would, and gives the outcome when it is known.
func tryUserNamespace(ctx context.Context, cfg Config) <-chan error {
	outcome := make(chan error, 1)
	cmd := exec.CommandContext(ctx, "/bin/true")
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: int(cfg.UIDMapBase), Size: int(cfg.UIDMapSize)}}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids}
	go func() { outcome <- cmd.Run() }()
	return outcome
}

// hasSeccomp reads this process's own status: the line exists when the kernel filters system calls.
func hasSeccomp(procDir string) bool {
	status, err := os.ReadFile(procDir + "/self/status")
	return err == nil && strings.Contains(string(status), "\nSeccomp:")
}

// hasCapability reports whether root has the capability; in a container that a whole node runs in, it may lack some.
func hasCapability(which int) bool {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	return unix.Capget(&header, &sets[0]) == nil && sets[which/32].Effective&(1<<(which%32)) != 0
}

// Version asks containerd and runc what they are.
func (r *Runtime) Version(ctx context.Context) (Version, error) {
	v, err := r.client.Version(r.ns(ctx))
	if err != nil {
		return Version{}, unavailable(r.cfg.Address, err)
	}
	runc, err := RuncVersion(ctx)
	return Version{Containerd: v.Version, Runc: runc}, err
}

// RuncVersion asks the runc that containerd finds in the path; it needs no containerd.
func RuncVersion(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "runc", "--version").Output()
	if err != nil {
		return "", fault.New(fault.Unavailable, codeRuncUnavailable, "runc cannot be run: install it (apt-get install runc).",
			err)
	}
	first, _, _ := strings.Cut(string(out), "\n")
	return strings.TrimPrefix(first, "runc version "), nil
}
