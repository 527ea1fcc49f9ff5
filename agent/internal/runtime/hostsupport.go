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

	"github.com/gpuaas/gpuaas/agent/internal/host"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// hostSupport is what the kernel and containerd can give to containers.
type hostSupport struct {
	userNamespaces bool
	seccomp        bool
	swapLimit      bool
	// mappedMounts says that images are mounted with the containers' user ids, and not unpacked with them.
	mappedMounts bool
	// appArmor is the profile of containers; empty where the kernel has none for them.
	appArmor string
	// resourceLimits says that the agent may set limits of processes in user namespaces that other users have made.
	resourceLimits bool
	cgroupV2       bool
	// cgroupRoot is where the hierarchies are mounted.
	cgroupRoot string
	// contentRoot is where containerd keeps unpacked images.
	contentRoot string
	// sharedDisk says that containers write to the file system of the agent's own data.
	sharedDisk bool
}

func (h hostSupport) conditions() []string {
	var c []string
	for _, feature := range []struct {
		missing   bool
		condition string
	}{
		{!h.userNamespaces, protocol.ConditionNoUserNamespaces},
		{h.userNamespaces && !h.mappedMounts, protocol.ConditionNoMappedMounts},
		{!h.seccomp, protocol.ConditionNoSeccomp},
		{!h.swapLimit, protocol.ConditionNoSwapLimit},
		{h.appArmor == "", protocol.ConditionNoAppArmor},
		{h.sharedDisk, protocol.ConditionSharedDisk},
		{!h.resourceLimits, protocol.ConditionNoCoreLimit},
	} {
		if feature.missing {
			c = append(c, feature.condition)
		}
	}
	return c
}

// detectHost asks containerd and the kernel. userNamespace is the outcome of tryUserNamespace.
func detectHost(ctx context.Context, c *client.Client, cfg Config, userNamespace <-chan error) (hostSupport, error) {
	plugins, err := c.IntrospectionService().Plugins(ctx)
	if err != nil {
		return hostSupport{}, unavailable(cfg.Address, err)
	}
	found, root := false, ""
	for _, p := range plugins.GetPlugins() {
		if p.GetType() == "io.containerd.snapshotter.v1" && p.GetID() == snapshotter {
			found = p.GetInitErr() == nil
			root = p.GetExports()["root"]
		}
	}
	if !found {
		return hostSupport{}, fault.New(fault.Unavailable, codeSnapshotterUnavailable,
			fmt.Sprintf("containerd cannot use its snapshotter %s: look for it in `ctr plugins ls`; the overlay kernel module "+
				"may be missing.", snapshotter), nil)
	}
	const cgroupRoot = "/sys/fs/cgroup"
	cgroupV2 := exists(cgroupRoot + "/cgroup.controllers")
	h := hostSupport{
		seccomp:        hasSeccomp(cfg.ProcDir),
		resourceLimits: host.HasCapability(unix.CAP_SYS_RESOURCE),
		contentRoot:    root,
		cgroupRoot:     cgroupRoot,
		cgroupV2:       cgroupV2,
		swapLimit:      cgroupV2 || exists(cgroupRoot+"/memory/memory.memsw.limit_in_bytes"),
		sharedDisk:     sameFileSystem(root, cfg.LogDir),
	}
	if !cfg.NoUserNamespaces {
		if err := <-userNamespace; err != nil {
			return hostSupport{}, fault.New(fault.Unavailable, codeNoUserNamespaces,
				"This host gives containers no user namespaces (sysctl user.max_user_namespaces): their root would be the host's "+
					"root. Run the agent with --no-user-namespaces if that is what you want.", err).Permanent()
		}
		h.userNamespaces = true
	}
	if !h.seccomp && !cfg.NoSeccomp {
		return hostSupport{}, fault.New(fault.Unavailable, codeNoSeccomp,
			"This host's kernel cannot filter the system calls of containers (CONFIG_SECCOMP_FILTER). Run the agent with "+
				"--no-seccomp if you want to run them unfiltered.", nil).Permanent()
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

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func sameFileSystem(a, b string) bool {
	var one, other unix.Stat_t
	return unix.Stat(a, &one) == nil && unix.Stat(b, &other) == nil && one.Dev == other.Dev
}

// tryUserNamespace makes a user namespace, as a container would, and sends the outcome; then it closes the channel.
func tryUserNamespace(ctx context.Context, cfg Config) <-chan error {
	outcome := make(chan error, 1)
	cmd := exec.CommandContext(ctx, "/bin/true")
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: int(cfg.UIDMapBase), Size: int(cfg.UIDMapSize)}}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids}
	go func() {
		outcome <- cmd.Run()
		close(outcome)
	}()
	return outcome
}

// hasSeccomp reads this process's own status: the line exists when the kernel filters system calls.
func hasSeccomp(procDir string) bool {
	status, err := os.ReadFile(procDir + "/self/status")
	return err == nil && strings.Contains(string(status), "\nSeccomp:")
}

// Version returns the versions of containerd and runc.
func (r *Runtime) Version(ctx context.Context) (Version, error) {
	v, err := r.client.Version(r.ns(ctx))
	if err != nil {
		return Version{}, unavailable(r.cfg.Address, err)
	}
	runc, err := RuncVersion(ctx)
	return Version{Containerd: v.Version, Runc: runc}, err
}

// RuncVersion returns the version of the runc in the path; it needs no containerd.
func RuncVersion(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "runc", "--version").Output()
	if err != nil {
		return "", fault.New(fault.Unavailable, codeRuncUnavailable, "runc cannot be run: install it (apt-get install runc).",
			err)
	}
	first, _, _ := strings.Cut(string(out), "\n")
	return strings.TrimPrefix(first, "runc version "), nil
}
