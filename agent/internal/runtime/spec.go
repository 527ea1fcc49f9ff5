package runtime

import (
	"cmp"
	"fmt"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/contrib/seccomp"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuaas/gpuaas/agent/internal/cdi"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// Limits on what a spec may ask for.
const (
	maxScratches   = 16
	maxEnv         = 256
	maxEnvBytes    = 256 << 10
	minMemoryBytes = manifest.MinMemoryMiB << 20
	defaultPids    = 1024
	cpuPeriod      = 100_000 // microseconds, the kernel's default
	minCPUQuota    = manifest.MinCPUMillis * cpuPeriod / 1000
	// runDir is the writable directory that many programs expect, runTmpfsBytes its size where the root is read-only.
	runDir        = "/run"
	runTmpfsBytes = 64 << 20
	// workloadOOMScore makes the kernel kill a workload before the daemons; without it, workloads inherit their low score.
	workloadOOMScore = 500
	installOOMScore  = 1000 // an installation goes first: it may run beside the app that it is for
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
	// imageMounts are the images that are mounted beside its own.
	imageMounts []imageMount
}

// files are the paths on the host of the files that are bound into a container.
type files struct {
	dir, hosts, hostname, resolvConf, configDir, secretsDir, devices string
}

// publisherFile is the i-th of the service's files.
func (f files) publisherFile(i int) string { return filepath.Join(f.dir, fmt.Sprintf("file-%d", i)) }

// buildSpec is a pure function: the same input gives the same bytes.
func buildSpec(in specInput) (*specs.Spec, error) {
	svc := in.spec.Service
	args, err := arguments(svc, in.image)
	if err != nil {
		return nil, err
	}
	env, err := environment(in)
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
	resources.Devices = append(resources.Devices, deviceRules(in.spec.Devices)...)
	cwd := path.Clean("/" + cmp.Or(svc.GetWorkingDir(), in.image.WorkingDir))
	if manifest.InKernelFiles(cwd) {
		return nil, badSpec("The working directory of the manifest or the image must not be in /proc, /sys or /dev.")
	}
	oom := workloadOOMScore
	if svc.GetEnvironment().GetBuilds() {
		oom = installOOMScore
	}
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
			Capabilities:    capabilitiesOf(svc, in.user),
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
			// As in Docker: a service of any user may listen on the port that its manifest names.
			Sysctl: map[string]string{"net.ipv4.ip_unprivileged_port_start": "0"},
		},
	}
	if in.host.resourceLimits {
		// Open files stay as containerd was started with: inside a user namespace no limit can be raised.
		s.Process.Rlimits = []specs.POSIXRlimit{{Type: "RLIMIT_CORE"}}
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

// nativeOnly removes the architectures of 32 bits from a profile: their system calls end a program by SIGSYS. That code
// of the kernel has let containers out before (CVE-2014-0038, CVE-2021-22555), and each of its filters cost a launch as
// much as all mounts of the container.
func nativeOnly(profile *specs.LinuxSeccomp) *specs.LinuxSeccomp {
	profile.Architectures = slices.DeleteFunc(profile.Architectures, func(a specs.Arch) bool {
		return a == specs.ArchX86 || a == specs.ArchX32 || a == specs.ArchARM
	})
	return profile
}

// arguments follows Kubernetes: a command replaces the image's entry point and its arguments, args replace the latter.
func arguments(svc *protocol.Service, image ocispec.ImageConfig) ([]string, error) {
	if e := svc.GetEnvironment(); e.GetBuilds() {
		return installCommand(e), nil
	}
	command, given := image.Entrypoint, image.Cmd
	if len(svc.GetCommand()) > 0 {
		command, given = svc.GetCommand(), nil
	}
	if len(svc.GetArgs()) > 0 {
		given = svc.GetArgs()
	}
	args := slices.Concat(command, given)
	if len(args) == 0 {
		return nil, badSpec("Neither the manifest nor the image names a command.")
	}
	return args, nil
}

// environment keeps the image's order, then the manifest's; a later value replaces an earlier one in its place.
func environment(in specInput) ([]string, error) {
	svc := in.spec.Service
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
	for _, e := range in.image.Env {
		if name, value, ok := strings.Cut(e, "="); ok {
			set(name, value)
		}
	}
	for _, e := range svc.GetEnv() {
		set(e.GetName(), e.GetValue())
	}
	if svc.GetConfig() != nil {
		set("GPUAAS_CONFIG_FILE", configMount+"/"+configFile)
	}
	setDeviceVariables(env, in.spec.Devices, set)
	setEnvironmentVariables(env, in.spec, set)
	if len(in.spec.Secrets) > 0 {
		set("GPUAAS_PARAMETERS_DIR", secretsMount)
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
	// Machine-learning frameworks pass batches through shared memory; it counts against the container's memory limit.
	shmBytes := cmp.Or(svc.GetResources().GetShmBytes(), max(svc.GetResources().GetMemoryBytes()/2, runTmpfsBytes))
	all := []specs.Mount{
		mountOf("proc", "/proc", "nosuid,noexec,nodev"),
		mountOf("tmpfs", "/dev", "nosuid,strictatime,mode=755,size=65536k"),
		mountOf("devpts", "/dev/pts", "nosuid,noexec,newinstance,ptmxmode=0666,mode=0620,gid=5"),
		shmMount(in.spec.Devices, shmBytes),
		mountOf("mqueue", "/dev/mqueue", "nosuid,noexec,nodev"),
		mountOf("sysfs", "/sys", "nosuid,noexec,nodev,ro"),
		mountOf("cgroup", "/sys/fs/cgroup", "nosuid,noexec,nodev,relatime,ro"),
	}
	if run, has := runMount(in); has {
		all = append(all, run)
	}
	all = append(all,
		bindFile("/etc/hosts", in.files.hosts),
		bindFile("/etc/hostname", in.files.hostname),
		bindFile("/etc/resolv.conf", in.files.resolvConf),
	)
	if svc.GetConfig() != nil {
		// The directory, not the file: a file that is replaced by a rename would not be seen.
		all = append(all, bindFile(configMount, in.files.configDir))
	}
	if len(in.spec.Secrets) > 0 {
		all = append(all, bindFile(secretsMount, in.files.secretsDir))
	}
	scratch := svc.GetScratch()
	if len(scratch) > maxScratches {
		return nil, badSpec(fmt.Sprintf("A service may have %d scratch directories.", maxScratches))
	}
	seen := map[string]bool{}
	for _, one := range scratch {
		dst := path.Clean(one.GetPath())
		if !path.IsAbs(dst) || dst != one.GetPath() || dst != runDir && forbiddenMount(dst) || seen[dst] ||
			one.GetSizeBytes() == 0 {
			return nil, badSpec("A scratch directory needs a size and an absolute, clean path of its own that is not part of " +
				"the system.")
		}
		seen[dst] = true
		if dst != runDir {
			all = append(all, scratchMount(in.user, one))
		}
	}
	for _, one := range in.spec.Volumes {
		if dst := path.Clean(one.Path); !path.IsAbs(dst) || dst != one.Path || forbiddenMount(dst) || seen[dst] {
			return nil, badSpec("A volume needs an absolute, clean path of its own that is not part of the system.")
		}
		seen[one.Path] = true
		all = append(all, one.mount())
	}
	for _, one := range in.imageMounts {
		if seen[one.path] {
			return nil, badSpec("An image needs a path of its own.")
		}
		seen[one.path] = true
		all = append(all, one.mount())
	}
	for i, f := range svc.GetFiles() {
		all = append(all, bindFile(f.GetPath(), in.files.publisherFile(i)))
		if f.GetMode()&0o111 != 0 {
			all[len(all)-1].Options = slices.DeleteFunc(all[len(all)-1].Options, func(o string) bool { return o == "noexec" })
		}
	}
	return append(all, deviceMounts(in.spec.Devices, in.files.devices)...), nil
}

// runMount is the service's scratch directory at /run, or a file system in memory where it could not write there
// otherwise. Any other container has what its image has in /run: many images make the directories of their sockets
// there. It comes before what the runtime mounts below it.
func runMount(in specInput) (run specs.Mount, has bool) {
	for _, one := range in.spec.Service.GetScratch() {
		if one.GetPath() == runDir {
			return scratchMount(in.user, one), true
		}
	}
	return mountOf("tmpfs", runDir, fmt.Sprintf("nosuid,nodev,mode=755,size=%d", runTmpfsBytes)),
		in.spec.Service.GetReadOnlyRoot()
}

// scratchMount belongs to the service's user: where the image has this directory, runc gives the mount its mode.
func scratchMount(u user, one *protocol.Scratch) specs.Mount {
	return mountOf("tmpfs", one.GetPath(), fmt.Sprintf("nosuid,nodev,mode=1777,uid=%d,gid=%d,size=%d", u.uid, u.gid,
		one.GetSizeBytes()))
}

// forbiddenMount keeps mounts from covering what the runtime itself mounts. A scratch directory may replace /run.
func forbiddenMount(dst string) bool {
	return dst == "/" || dst == runDir || dst == "/etc" || manifest.InKernelFiles(dst)
}

// mountOf is a mount without a source of its own, with the options of mount(8).
func mountOf(kind, dst, options string) specs.Mount {
	return specs.Mount{Destination: dst, Type: kind, Source: kind, Options: strings.Split(options, ",")}
}

func bindFile(dst, src string) specs.Mount {
	m := mountOf("bind", dst, "rbind,ro,nosuid,nodev,noexec")
	m.Source = src
	return m
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
	// ID names the run and the container. The caller stores it before Prepare. It begins with the member's id and a dot,
	// by which leftovers of a crash are found. Letters, digits, dots, dashes, underscores; at most 76.
	ID         string
	MemberID   string
	InstanceID string
	// OrgID is the member's; needed where the container has a part of an accelerator.
	OrgID    string
	Revision uint64
	// SpecDigest is the caller's digest of the workload document; List returns it.
	SpecDigest string
	// Copy is the caller's, of a service that has several; List returns it.
	Copy    string
	Service *protocol.Service
	// Volumes are those of the service.
	Volumes []Volume
	// Devices are the edits for exactly the accelerators that the service names.
	Devices cdi.Edits
	// NetNSPath is the network namespace to join.
	NetNSPath string
	// UserNSPath is the user namespace to join, with the map of Config; required where user namespaces are available. It
	// must own the network namespace: otherwise the container cannot mount sysfs, nor runc enter it for a probe.
	UserNSPath string
	// Secrets are files that the container reads, by name. Nothing of them is kept but in memory.
	Secrets map[string][]byte
	// Environment is the id of the environment that the container installs; empty for any other container.
	Environment string
	// Packages is the directory of the packages, below the path of the environment that the container uses.
	Packages string
	// IP is the container's own address for /etc/hosts; empty while the network is not complete.
	IP string
	// Peers are the member's other services, for /etc/hosts.
	Peers []Peer
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
	}
	return cmp.Or(checkNames(s.Service), checkCapabilities(s.Service), checkFiles(s.Service),
		checkImageMounts(s.Service), s.checkDevices())
}

// hostname is the start of the member's id: short, and the same in every run.
func (s Spec) hostname() string {
	name := strings.ToLower(s.Service.GetName()) + "-" + s.MemberID[:min(8, len(s.MemberID))]
	return strings.Trim(regexp.MustCompile(`[^a-z0-9-]+`).ReplaceAllString(name, "-")[:min(63, len(name))], "-")
}
