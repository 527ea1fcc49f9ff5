package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Limits of the checks.
const (
	// MinFreeBytes and MinFreeFiles are what the agent's directories need: below that, unsent usage could not be kept.
	MinFreeBytes = 256 << 20
	MinFreeFiles = 1024
	dialTimeout  = 5 * time.Second
	// clockSlack is how far a clock may lie behind a time that has certainly passed.
	clockSlack = time.Minute
)

// Requirements are what a node needs of its machine.
type Requirements struct {
	// DataDir and RunDir are the agent's directories; they are there already.
	DataDir, RunDir string
	// ContainerdAddress is the path of containerd's socket.
	ContainerdAddress string
	// Enrolled leaves the space out: a node that has run workloads starts on a full disk, because only then can it end
	// them.
	Enrolled bool
	// MinFreeBytes overrides the constant of that name.
	MinFreeBytes uint64
}

// Check tests everything that a node needs and names all that is missing, each with what to do. All of it is fatal: an
// agent without it would fail later, with a workload.
func Check(ctx context.Context, want Requirements) error {
	var missing []error
	if os.Geteuid() != 0 {
		missing = append(missing, fault.New(fault.Forbidden, codeNotRoot, "The agent must run as root: it makes containers "+
			"and networks.", nil))
	}
	missing = append(missing, binaries(), kernelFeatures(Config{}), containerd(ctx, want.ContainerdAddress))
	for _, dir := range []string{want.DataDir, want.RunDir} {
		err := space(dir, cmp.Or(want.MinFreeBytes, MinFreeBytes))
		if !want.Enrolled || !agent.IsDiskFull(err) && !errors.Is(err, unix.ENOSPC) {
			missing = append(missing, err)
		}
	}
	return joinFaults(missing)
}

// joinFaults makes one fault of several: the first one's code, the texts of all.
func joinFaults(all []error) error {
	all = slices.DeleteFunc(all, func(err error) bool { return err == nil })
	switch len(all) {
	case 0:
		return nil
	case 1:
		return all[0]
	}
	first := *fault.As(all[0])
	var texts []string
	for _, err := range all {
		texts = append(texts, fault.As(err).Public)
	}
	first.Public, first.Cause = strings.Join(texts, "\n"), errors.Join(all...)
	return &first
}

func unavailable(code fault.Code, public string, cause error) error {
	return fault.New(fault.Unavailable, code, public, cause)
}

func binaries() error {
	var absent []string
	for name, debianPackage := range map[string]string{
		"runc": "runc", "containerd-shim-runc-v2": "containerd", "iptables": "iptables",
	} {
		if _, err := exec.LookPath(name); err == nil {
			continue
		}
		if _, err := exec.LookPath(filepath.Join("/usr/sbin", name)); err != nil && !slices.Contains(absent, debianPackage) {
			absent = append(absent, debianPackage)
		}
	}
	if len(absent) == 0 {
		return nil
	}
	slices.Sort(absent)
	return unavailable(codeBinaryMissing, "Programs that a node needs are missing: apt-get install "+strings.Join(absent,
		" "), nil)
}

// kernelFeatures checks for the overlay file system and for the cgroup controllers that limits need.
func kernelFeatures(cfg Config) error {
	systems, err := cfg.read("proc/filesystems")
	if err != nil {
		return unavailable(codeKernelFeatureMissing, "/proc is not mounted.", err)
	}
	if !strings.Contains(systems, "\toverlay\n") {
		return unavailable(codeKernelFeatureMissing, "The kernel has no overlay file system: modprobe overlay, and add it "+
			"to /etc/modules-load.d.", nil)
	}
	controllers, err := cfg.read("sys/fs/cgroup/cgroup.controllers")
	if err != nil {
		// Version 1: one mounted hierarchy for each.
		for _, name := range []string{"cpu", "memory", "pids"} {
			if _, err := os.Stat(filepath.Join("/", cfg.Root, "sys/fs/cgroup", name)); err == nil {
				controllers += " " + name
			}
		}
	}
	for _, name := range []string{"cpu", "memory", "pids"} {
		if !slices.Contains(strings.Fields(controllers), name) {
			return unavailable(codeKernelFeatureMissing, fmt.Sprintf("The cgroup controller %s is not available, so limits "+
				"could not be enforced: mount cgroups, or boot with cgroup_enable=%s.", name, name), nil)
		}
	}
	return nil
}

func containerd(ctx context.Context, address string) error {
	const what = "apt-get install containerd and systemctl start containerd, or name another socket with " +
		"--containerd-address."
	if _, err := os.Stat(address); err != nil {
		return unavailable(agent.CodeContainerdUnavailable, fmt.Sprintf("There is no containerd socket at %s: %s", address,
			what),
			err)
	}
	dialer := net.Dialer{Timeout: dialTimeout}
	conn, err := dialer.DialContext(ctx, "unix", address)
	if err != nil {
		return unavailable(agent.CodeContainerdUnavailable, fmt.Sprintf("containerd does not answer at %s: %s", address,
			what), err)
	}
	return conn.Close()
}

// space checks that the directory's file system has free space and can be written.
func space(dir string, limit uint64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return unavailable(fault.CodeDirectoryUnusable, fmt.Sprintf("The directory %s cannot be read.", dir), err)
	}
	if free := st.Bavail * uint64(st.Bsize); free < limit {
		return unavailable(fault.CodeDiskFull, fmt.Sprintf("The disk of %s has %d MiB free; a node needs %d MiB: free "+
			"space there, or put the directory elsewhere.", dir, free>>20, limit>>20), nil)
	}
	// A file system that does not count files says 0 of 0.
	if st.Files > 0 && st.Ffree < MinFreeFiles {
		return unavailable(fault.CodeDiskFull, fmt.Sprintf("The disk of %s has no free inodes: remove files there, or put "+
			"the directory elsewhere.", dir), nil)
	}
	probe, err := os.CreateTemp(dir, ".writable-")
	if err != nil {
		return unavailable(fault.CodeDirectoryUnusable, fmt.Sprintf("The directory %s cannot be written: it may be mounted "+
			"read-only, or its disk may be full.", dir), err)
	}
	return errors.Join(probe.Close(), os.Remove(probe.Name()))
}

// CheckClock fails when the machine's clock is behind a time that has certainly passed, such as the program's build or
// the newest signed document. The agent starts all the same: it uses the later time until a hub sends the time.
func CheckClock(now, passed time.Time) error {
	if now.Add(clockSlack).After(passed) {
		return nil
	}
	return unavailable(fault.CodeClockWrong, fmt.Sprintf("This machine's clock says %s, but it is at least %s: set it "+
		"(timedatectl set-ntp true, or date -s) and look after its battery.",
		now.UTC().Format(time.RFC3339), passed.UTC().Format(time.RFC3339)), nil)
}

// HasCapability reports whether the agent has the capability; where a node runs in a container, root may lack some.
func HasCapability(which int) bool {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	return unix.Capget(&header, &sets[0]) == nil && sets[which/32].Effective&(1<<(which%32)) != 0
}
