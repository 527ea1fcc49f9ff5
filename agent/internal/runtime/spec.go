package runtime

import (
	"fmt"
	"maps"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/containerd/v2/contrib/seccomp"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// Limits on what a spec may ask for.
const (
	maxScratches   = 16
	maxEnv         = 256
	maxEnvBytes    = 256 << 10
	minMemoryBytes = 8 << 20 // below that runc itself does not come up
	defaultPids    = 1024
	cpuPeriod      = 100_000 // microseconds, the kernel's default
	minCPUQuota    = 1_000   // microseconds, the kernel's minimum
	// runTmpfsBytes is the size of the writable /run that many programs expect.
	runTmpfsBytes = 64 << 20
	// workloadOOMScore makes the kernel end a workload before the daemons, which would otherwise pass their own low score
	// on.
	workloadOOMScore = 500
)

// capabilities is all that a container's root keeps, and only inside its user namespace. A container whose user is not
// root has none of them.
//
//   - CHOWN, DAC_OVERRIDE, FOWNER: entry points that prepare their data directory
//   - SETUID, SETGID: entry points that step down to a service user
//   - KILL: supervisors whose children run as other users
//   - NET_BIND_SERVICE: ports below 1024
func capabilities() []string {
	return []string{
		"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL", "CAP_NET_BIND_SERVICE", "CAP_SETGID",
		"CAP_SETUID",
	}
}

// maskedPaths hold the host's secrets or controls; readonlyPaths would let a container change the host.
func maskedPaths() []string {
	return []string{
		"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
		"/proc/sched_debug", "/proc/scsi",
		"/proc/timer_list", "/proc/timer_stats", "/sys/devices/virtual/powercap", "/sys/firmware",
	}
}

func readonlyPaths() []string {
	return []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
}

// user is who a container's process runs as, inside its user namespace.
type user struct {
	uid, gid uint32
	groups   []uint32
}

// specInput is everything that a container's OCI spec depends on.
type specInput struct {
	spec   Spec
	image  ocispec.ImageConfig
	user   user
	host   hostSupport
	files  files
	cgroup string
	uidMap specs.LinuxIDMapping
}

// files are the host's paths of what is bound into a container.
type files struct {
	dir, hosts, hostname, resolvConf string
}

// buildSpec is a pure function: the same input gives the same bytes.
func buildSpec(in specInput) (*specs.Spec, error) {
	svc := in.spec.Service
	args, err := arguments(svc, in.image)
	if err != nil {
		return nil, err
	}
	env, err := environment(svc, in.image)
	if err != nil {
		return nil, err
	}
	mounts, err := mounts(in)
	if err != nil {
		return nil, err
	}
	resources, err := resources(svc.GetResources(), in.host)
	if err != nil {
		return nil, err
	}
	cwd := svc.GetWorkingDir()
	if cwd == "" {
		cwd = in.image.WorkingDir
	}
	if !path.IsAbs(cwd) {
		cwd = "/" + cwd
	}
	cwd = path.Clean(cwd)
	if manifest.InKernelFiles(cwd) {
		return nil, badSpec("The working directory of the manifest or the image must not be in /proc, /sys or /dev.")
	}
	oom := workloadOOMScore
	caps := capabilities()
	s := &specs.Spec{
		// What Debian's runc 1.1 knows; nothing newer is used.
		Version:  "1.0.2-dev",
		Hostname: in.spec.hostname(),
		Root:     &specs.Root{Path: "rootfs", Readonly: svc.GetReadOnlyRoot()},
		Process: &specs.Process{
			User:            specs.User{UID: in.user.uid, GID: in.user.gid, AdditionalGids: in.user.groups},
			Args:            args,
			Env:             env,
			Cwd:             cwd,
			NoNewPrivileges: true,
			Capabilities:    &specs.LinuxCapabilities{Bounding: caps, Effective: caps, Permitted: caps},
			OOMScoreAdj:     &oom,
			ApparmorProfile: in.host.appArmor,
		},
		Mounts: mounts,
		Linux: &specs.Linux{
			CgroupsPath:   in.cgroup,
			Resources:     resources,
			Namespaces:    namespacesOf(in),
			MaskedPaths:   maskedPaths(),
			ReadonlyPaths: readonlyPaths(),
		},
	}
	if in.host.resourceLimits {
		// Open files stay as containerd was started with: inside a user namespace no limit can be raised.
		s.Process.Rlimits = []specs.POSIXRlimit{{Type: "RLIMIT_CORE"}}
	}
	if in.user.uid != 0 {
		s.Process.Capabilities = &specs.LinuxCapabilities{}
	}
	if in.host.userNamespaces {
		s.Linux.UIDMappings = []specs.LinuxIDMapping{in.uidMap}
		s.Linux.GIDMappings = []specs.LinuxIDMapping{in.uidMap}
	}
	if in.host.seccomp {
		s.Linux.Seccomp = nativeOnly(seccomp.DefaultProfile(s))
	}
	return s, nil
}

// nativeOnly leaves a profile the architecture that the kernel runs in, without the kernel's entries for programs of 32
// bits: a program that takes one of those is ended by SIGSYS. Few maintain that code; it has let containers out
// before (CVE-2014-0038, CVE-2021-22555), and the filter of each of them cost as much of a launch as the whole
// container's mounts.
func nativeOnly(profile *specs.LinuxSeccomp) *specs.LinuxSeccomp {
	profile.Architectures = slices.DeleteFunc(profile.Architectures, func(a specs.Arch) bool {
		return a == specs.ArchX86 || a == specs.ArchX32 || a == specs.ArchARM
	})
	return profile
}

func arguments(svc *protocol.Service, image ocispec.ImageConfig) ([]string, error) {
	args := svc.GetCommand()
	if len(args) == 0 {
		args = slices.Concat(image.Entrypoint, image.Cmd)
	}
	if len(args) == 0 {
		return nil, badSpec("Neither the manifest nor the image names a command.")
	}
	return args, nil
}

// environment keeps the image's order, then the manifest's; a later value replaces an earlier one in its place.
func environment(svc *protocol.Service, image ocispec.ImageConfig) ([]string, error) {
	env := []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	set := func(name, value string) {
		entry := name + "=" + value
		for i, old := range env {
			if strings.HasPrefix(old, name+"=") {
				env[i] = entry
				return
			}
		}
		env = append(env, entry)
	}
	for _, e := range image.Env {
		if name, value, ok := strings.Cut(e, "="); ok {
			set(name, value)
		}
	}
	for _, e := range svc.GetEnv() {
		set(e.GetName(), e.GetValue())
	}
	total := 0
	for _, e := range env {
		total += len(e)
	}
	if len(env) > maxEnv || total > maxEnvBytes {
		return nil, badSpec(fmt.Sprintf("The environment has more than %d variables or %d bytes.", maxEnv, maxEnvBytes))
	}
	return env, nil
}

func mounts(in specInput) ([]specs.Mount, error) {
	svc := in.spec.Service
	shm := max(svc.GetResources().GetMemoryBytes()/2, runTmpfsBytes)
	all := []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{
			"nosuid", "strictatime", "mode=755",
			"size=65536k",
		}},
		{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{
			"nosuid", "noexec", "newinstance",
			"ptmxmode=0666", "mode=0620", "gid=5",
		}},
		// Machine-learning frameworks pass batches through shared memory; it counts against the container's memory limit.
		{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: []string{
			"nosuid", "noexec", "nodev", "mode=1777",
			fmt.Sprintf("size=%d", shm),
		}},
		{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
		{Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup", Options: []string{
			"nosuid", "noexec", "nodev",
			"relatime", "ro",
		}},
		{Destination: "/run", Type: "tmpfs", Source: "tmpfs", Options: []string{
			"nosuid", "nodev", "mode=755",
			fmt.Sprintf("size=%d", runTmpfsBytes),
		}},
		bindFile("/etc/hosts", in.files.hosts),
		bindFile("/etc/hostname", in.files.hostname),
		bindFile("/etc/resolv.conf", in.files.resolvConf),
	}
	scratch := svc.GetScratch()
	if len(scratch) > maxScratches {
		return nil, badSpec(fmt.Sprintf("A service may have %d scratch directories.", maxScratches))
	}
	seen := map[string]bool{}
	for _, one := range scratch {
		dst := path.Clean(one.GetPath())
		if !path.IsAbs(dst) || dst != one.GetPath() || forbiddenScratch(dst) || seen[dst] || one.GetSizeBytes() == 0 {
			return nil, badSpec("A scratch directory needs a size and an absolute, clean path of its own that is not part of " +
				"the system.")
		}
		seen[dst] = true
		// It belongs to the service's user: where the image has a directory of that path, runc gives the mount that one's
		// mode.
		all = append(all, specs.Mount{
			Destination: dst, Type: "tmpfs", Source: "tmpfs",
			Options: []string{
				"nosuid", "nodev", "mode=1777", fmt.Sprintf("uid=%d", in.user.uid), fmt.Sprintf("gid=%d", in.user.gid),
				fmt.Sprintf("size=%d", one.GetSizeBytes()),
			},
		})
	}
	return all, nil
}

// forbiddenScratch keeps scratch from covering what the runtime itself mounts.
func forbiddenScratch(dst string) bool {
	return dst == "/" || dst == "/run" || dst == "/etc" || manifest.InKernelFiles(dst)
}

func bindFile(dst, src string) specs.Mount {
	return specs.Mount{Destination: dst, Type: "bind", Source: src, Options: []string{
		"rbind", "ro", "nosuid", "nodev",
		"noexec",
	}}
}

func namespacesOf(in specInput) []specs.LinuxNamespace {
	ns := []specs.LinuxNamespace{
		{Type: specs.PIDNamespace},
		{Type: specs.IPCNamespace},
		{Type: specs.UTSNamespace},
		{Type: specs.MountNamespace},
		{Type: specs.CgroupNamespace},
		{Type: specs.NetworkNamespace, Path: in.spec.NetNSPath},
	}
	if in.host.userNamespaces {
		ns = append(ns, specs.LinuxNamespace{Type: specs.UserNamespace, Path: in.spec.UserNSPath})
	}
	return ns
}

func resources(want *protocol.Resources, host hostSupport) (*specs.LinuxResources, error) {
	quota := int64(want.GetCpuMillis()) * cpuPeriod / 1000
	shares := max(uint64(want.GetCpuMillis())*1024/1000, 2)
	memory, period, pids := int64(want.GetMemoryBytes()), uint64(cpuPeriod), int64(want.GetPids())
	switch {
	case quota < minCPUQuota:
		return nil, badSpec("A service needs a CPU limit of at least 10 thousandths of a core.")
	case memory < minMemoryBytes:
		return nil, badSpec(fmt.Sprintf("A service needs a memory limit of at least %d bytes.", minMemoryBytes))
	case pids == 0:
		pids = defaultPids
	}
	r := &specs.LinuxResources{
		// runc adds the harmless ones (null, zero, full, random, urandom, tty, pts) by itself.
		Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}},
		CPU:     &specs.LinuxCPU{Quota: &quota, Period: &period, Shares: &shares},
		Memory:  &specs.LinuxMemory{Limit: &memory},
		Pids:    &specs.LinuxPids{Limit: &pids},
	}
	if host.swapLimit {
		// Memory and swap together: no swap on top of the limit.
		r.Memory.Swap = &memory
	}
	return r, nil
}

func badSpec(public string) error {
	return fault.New(fault.Unprocessable, codeBadWorkload, public, nil).Permanent()
}

// Spec is one run of one container of a workload.
type Spec struct {
	// ID names the run and the container. The caller chooses it and remembers it before Start, so that nothing runs that
	// nobody knows of. It begins with the member's id and a dot, so that whatever a crash leaves behind is found by the
	// member alone. Letters, digits, dots, dashes, underscores; at most 76.
	ID         string
	MemberID   string
	InstanceID string
	Revision   uint64
	// SpecDigest is the caller's digest of the workload document; it comes back in List.
	SpecDigest string
	Service    *protocol.Service
	// NetNSPath is the network namespace to join.
	NetNSPath string
	// UserNSPath is the user namespace to join, which owns that network namespace: otherwise the kernel lets the container
	// neither mount its sysfs nor be entered by runc for a probe. Required where user namespaces are available; its map is
	// that of Config.
	UserNSPath string
	// IP is the container's own address for /etc/hosts; may be empty while the network is not complete.
	IP string
	// Labels are the caller's own; they come back in List.
	Labels map[string]string
}

// idPattern is containerd's own rule for identifiers.
var idPattern = regexp.MustCompile(`^[A-Za-z0-9]+(?:[._-][A-Za-z0-9]+)*$`)

const maxIDLength = 76

func (s Spec) check(host hostSupport) error {
	switch {
	case !idPattern.MatchString(s.ID) || len(s.ID) > maxIDLength:
		return badSpec("The run has no usable id.")
	case s.MemberID == "" || s.Service.GetName() == "":
		return badSpec("The run names no member or no service.")
	case !strings.HasPrefix(s.ID, s.MemberID+"."):
		return badSpec("The run's id does not begin with its member's.")
	case !filepath.IsAbs(s.NetNSPath):
		return badSpec("The run has no network namespace.")
	case host.userNamespaces != filepath.IsAbs(s.UserNSPath):
		return badSpec("The run needs a user namespace exactly where the host gives them.")
	case len(s.Service.GetResources().GetAcceleratorIds()) > 0:
		return fault.New(fault.Unprocessable, agent.CodeFeatureMissing,
			"This agent cannot attach accelerators to containers yet.", nil).Permanent()
	}
	for name := range s.Labels {
		if strings.HasPrefix(name, labelPrefix) {
			return badSpec("Labels that begin with " + labelPrefix + " are the runtime's own.")
		}
	}
	return nil
}

// hostname is the start of the member's id: short, and the same in every run.
func (s Spec) hostname() string {
	name := strings.ToLower(s.Service.GetName()) + "-" + s.MemberID[:min(8, len(s.MemberID))]
	return strings.Trim(regexp.MustCompile(`[^a-z0-9-]+`).ReplaceAllString(name, "-")[:min(63, len(name))], "-")
}

// The labels on a container, by which it is found again after any crash.
const (
	labelPrefix     = "gpuaas."
	labelMember     = labelPrefix + "member"
	labelInstance   = labelPrefix + "instance"
	labelService    = labelPrefix + "service"
	labelRevision   = labelPrefix + "revision"
	labelSpecDigest = labelPrefix + "spec-digest"
	labelUserNS     = labelPrefix + "user-namespace"
	labelStopSignal = labelPrefix + "stop-signal"
	labelDiskBytes  = labelPrefix + "disk-bytes"
)

func (s Spec) labels(host hostSupport, uidMap specs.LinuxIDMapping, stopSignal string,
	diskBytes int64,
) map[string]string {
	l := map[string]string{}
	maps.Copy(l, s.Labels)
	l[labelMember] = s.MemberID
	l[labelInstance] = s.InstanceID
	l[labelService] = s.Service.GetName()
	l[labelRevision] = fmt.Sprint(s.Revision)
	l[labelSpecDigest] = s.SpecDigest
	l[labelDiskBytes] = strconv.FormatInt(diskBytes, 10)
	l[labelUserNS] = "none"
	if host.userNamespaces {
		l[labelUserNS] = fmt.Sprintf("%d:%d", uidMap.HostID, uidMap.Size)
	}
	if stopSignal != "" {
		l[labelStopSignal] = stopSignal
	}
	return l
}
