package main

import (
	"cmp"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/hubsession"
	"github.com/gpuaas/gpuaas/agent/internal/accelerator"
	"github.com/gpuaas/gpuaas/agent/internal/local"
	"github.com/gpuaas/gpuaas/agent/internal/network"
	"github.com/gpuaas/gpuaas/agent/internal/reconcile"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/uplink"
	"github.com/gpuaas/gpuaas/agent/internal/volume"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/agent/policy"
	"github.com/gpuaas/gpuaas/pkg/daemon"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
)

const (
	defaultDataDir = "/var/lib/gpuaas-agent"
	defaultRunDir  = "/run/gpuaas-agent"
	defaultSocket  = defaultRunDir + "/agent.sock"
	// runDirMode lets containers in user namespaces walk to the files that are bound into them.
	runDirMode = 0o711

	shortestInterval = 100 * time.Millisecond
	longestInterval  = time.Hour
)

// config is what flags and environment say. The flags of a room are fields of the room's own configuration.
type config struct {
	dataDir, runDir                string
	localSocket, socketMode        string
	rootFingerprint, joinTokenFile string
	portRange                      string
	policyFile                     string
	logLevel                       string

	containerDiskMiB, imageStoreMiB uint32

	runtime   runtime.Config
	network   network.Config
	reconcile reconcile.Config
	uplink    uplink.Config
	inventory accelerator.Config
	// sharing is what accelerator.ParseSharing reads.
	sharing string
}

// machineFlags say where on the machine everything is; uninstall needs them too.
func (c *config) machineFlags(f *pflag.FlagSet) {
	f.StringVar(&c.dataDir, "data-dir", defaultDataDir, "directory of everything that must outlive a reboot: keys, "+
		"state, usage, logs")
	f.StringVar(&c.runDir, "run-dir", defaultRunDir, "directory of what a reboot may empty: socket, networks, files "+
		"bound into containers")
	f.StringVar(&c.localSocket, "local-socket", "", "Unix socket of the local commands (default: <run-dir>/agent.sock)")
	f.StringVar(&c.socketMode, "local-socket-mode", "0600", "file mode of the socket: 0600, or 0660 to let its group in")
	f.StringVar(&c.runtime.Address, "containerd-address", runtime.DefaultAddress, "socket of containerd")
	f.StringVar(&c.runtime.Namespace, "containerd-namespace", runtime.DefaultNamespace,
		"containerd namespace that belongs to this agent alone")
	f.StringVar(&c.runtime.CgroupParent, "cgroup-parent", runtime.DefaultCgroup, "cgroup that holds all containers")
	f.Uint32Var(&c.runtime.UIDMapBase, "uid-map-base", runtime.DefaultUIDMapBase,
		"first user id of the range that containers run in")
	f.Uint32Var(&c.runtime.UIDMapSize, "uid-map-size", runtime.DefaultUIDMapSize, "size of that range")
	f.BoolVar(&c.runtime.NoUserNamespaces, "no-user-namespaces", false, "run containers in the host's user namespace, "+
		"reported as a condition; without it the agent does not start where the kernel has no user namespaces")
	f.BoolVar(&c.runtime.NoIDMappedMounts, "no-idmapped-mounts", false, "unpack images in the user ids of containers, "+
		"reported as a condition; without it the agent does so where the kernel cannot map them")
	f.BoolVar(&c.runtime.NoSeccomp, "no-seccomp", false, "run containers without a filter of system calls, reported as a "+
		"condition; without it the agent does not start where the kernel has no filter")
	f.StringVar(&c.network.Bridge, "bridge", network.DefaultBridge, "network bridge of the containers; at most 15 "+
		"characters")
	f.StringVar(&c.network.CIDR, "pod-cidr", network.DefaultCIDR, "addresses of the containers")
	f.StringVar(&c.portRange, "port-range", "20000-29999", "ports of 127.0.0.1 on which endpoints are published")
	f.StringVar(&c.logLevel, "log-level", "info", "debug, info, warn or error")
}

// enrollmentFlags are needed until the node is enrolled.
func (c *config) enrollmentFlags(f *pflag.FlagSet) {
	f.StringVar(&c.uplink.APIURL, "api-url", "", "address of the hub's API, https://host:port; kept after enrollment")
	f.StringVar(&c.rootFingerprint, "root-fingerprint", "", "what gpuaas-hub init or trust show printed: the "+
		"fingerprint of a root key, sha256:…, or the digest of the root role, root-role-sha256:…; kept after enrollment, "+
		"and must name the same root when given again")
	f.StringVar(&c.joinTokenFile, "join-token-file", "", "file with the one-time join token, needed until the node is "+
		"enrolled")
}

func (c *config) runFlags(f *pflag.FlagSet) {
	c.machineFlags(f)
	c.enrollmentFlags(f)
	f.StringVar(&c.uplink.SessionAddr, "session-addr", "", "host:port (UDP) of the hub's sessions (default: what the hub "+
		"said at enrollment)")
	c.intervalFlags(f)
	f.Uint32Var(&c.containerDiskMiB, "container-disk-mib", runtime.DefaultDiskBytes>>20,
		"what a container may write to its own file system where its manifest does not say (resources.disk_mib), in MiB; "+
			"one that writes more ends with disk_limit")
	f.Uint32Var(&c.imageStoreMiB, "image-store-mib", 0, "what images may take while some of them are unused, in MiB; 0 "+
		"collects unused ones only when less than a seventh of the disk is free")
	f.StringVar(&c.policyFile, "policy", local.DefaultPolicyFile, "file with the owner's policy (YAML), read again at "+
		"each resync; the default file may be missing")
	f.StringVar(&c.inventory.NVML, "nvml", "", "program that asks NVIDIA's driver for the machine's accelerators "+
		"(default: gpuaas-nvml beside this program)")
	f.StringVar(&c.inventory.DriverRoot, "nvidia-driver-root", "/", "directory in which NVIDIA's driver is installed; "+
		"containers get its libraries from there")
	f.StringVar(&c.inventory.TestProgram, "accelerator-test", "", "program that tests an accelerator before it returns "+
		"from a reset or from quarantine; it gets vendor, id and PCI address, and ends with 0 where the accelerator works")
	f.StringVar(&c.sharing, "accelerator-sharing", "", "which NVIDIA GPUs are shared within an org, as ID=MODE separated "+
		"by commas: ID is a GPU's id or all, MODE is exclusive, mps:SLICES or time_slices:SLICES")
	f.StringVar(&c.inventory.Root, "accelerator-root", "/", "directory with the /sys, /proc, /dev/kmsg and /opt in which "+
		"the machine's accelerators are found")
	f.BoolVar(&c.reconcile.AllowUnbilled, "allow-run-unbilled", false, "let workloads whose lease says so go on without "+
		"pay when it ends")
}

// intervalFlags have bounds: a wrong unit would keep the disk busy, or leave usage unmeasured for hours.
func (c *config) intervalFlags(f *pflag.FlagSet) {
	daemon.DurationVar(f, &c.reconcile.MeteringInterval, "metering-interval", agent.DefaultMeteringInterval,
		shortestInterval, longestInterval, "how often usage is measured and made durable, 100ms to 1h; a power cut loses at "+
			"most this much, in the tenant's favour")
	daemon.DurationVar(f, &c.reconcile.UsageInterval, "usage-interval", meter.DefaultCutEvery, shortestInterval,
		longestInterval, "longest time in one usage record, 100ms to 1h")
	daemon.DurationVar(f, &c.uplink.ReportInterval, "report-interval", hubsession.DefaultReportInterval, shortestInterval,
		longestInterval, "how often the node reports when nothing changes, 100ms to 1h")
	daemon.DurationVar(f, &c.uplink.DialRetryMax, "dial-retry-max", hubsession.DefaultDialRetryMax,
		hubsession.DialRetryMin, longestInterval, "longest pause before a hub that does not answer is dialled again, 500ms "+
			"to 1h")
	daemon.DurationVar(f, &c.reconcile.Resync, "resync", agent.DefaultResync, shortestInterval, longestInterval,
		"how often the agent checks everything again without a cause, 100ms to 1h")
}

func (c *config) socket() string {
	return cmp.Or(c.localSocket, filepath.Join(c.runDir, "agent.sock"))
}

func (c *config) inventoryConfig(log *slog.Logger) accelerator.Config {
	cfg := c.inventory
	if self, err := os.Executable(); cfg.NVML == "" && err == nil {
		cfg.NVML = filepath.Join(filepath.Dir(self), "gpuaas-nvml")
	}
	cfg.Log, cfg.LadderFile, cfg.MPSDir = log, filepath.Join(c.runDir, "accelerators.json"), filepath.Join(c.runDir, "mps")
	return cfg
}

func (c *config) mode() (os.FileMode, error) {
	m, err := strconv.ParseUint(c.socketMode, 8, 32)
	if err != nil || (m != 0o600 && m != 0o660) {
		return 0, fault.New(fault.Malformed, fault.CodeFlagInvalid, "--local-socket-mode must be 0600 or 0660.", err)
	}
	return os.FileMode(m), nil
}

func (c *config) ports() (from, to uint16, err error) {
	first, last, ok := strings.Cut(c.portRange, "-")
	a, errA := strconv.ParseUint(first, 10, 16)
	b, errB := strconv.ParseUint(last, 10, 16)
	if !ok || errA != nil || errB != nil || a == 0 || a > b {
		return 0, 0, fault.New(fault.Malformed, fault.CodeFlagInvalid, "--port-range must look like 20000-29999.", nil)
	}
	return uint16(a), uint16(b), nil
}

func (c *config) logger() (*slog.Logger, error) {
	log, err := telemetry.NewLogger(os.Stderr, telemetry.LogConfig{Level: c.logLevel})
	if err != nil {
		return nil, fault.New(fault.Malformed, fault.CodeFlagInvalid, "--log-level must be debug, info, warn or error.", err)
	}
	return log, nil
}

func (c *config) runtimeConfig(log *slog.Logger) runtime.Config {
	r := c.runtime
	r.StateDir, r.RuncRoot = filepath.Join(c.runDir, "containers"), filepath.Join(c.runDir, "runc")
	r.LogDir, r.Log = filepath.Join(c.dataDir, "logs"), log
	r.DiskBytes, r.MaxImageStoreBytes = int64(c.containerDiskMiB)<<20, int64(c.imageStoreMiB)<<20
	return r
}

func (c *config) networkConfig(rt *runtime.Runtime, egress func() policy.Egress, log *slog.Logger) network.Config {
	n := c.network
	n.StateDir, n.Egress, n.Resolvers, n.Log = filepath.Join(c.runDir, "network"), egress, rt.Resolvers, log
	if available, base, size := rt.UserNamespaces(); available {
		n.UIDMapBase, n.UIDMapSize = base, size
	}
	return n
}

// openVolumes opens the volumes of this node and, of the same kind, its environments.
func (c *config) openVolumes(log *slog.Logger) (*volume.Volumes, *volume.Environments, error) {
	at := func(name string) volume.Config {
		return volume.Config{Dir: filepath.Join(c.dataDir, name), MountDir: filepath.Join(c.runDir, name), Log: log}
	}
	volumes, err := volume.Open(at("volumes"))
	if err != nil {
		return nil, nil, err
	}
	environments, err := volume.OpenEnvironments(at("environments"), volumes)
	return volumes, environments, err
}

// directories makes the two directories, with the modes that their contents need.
func (c *config) directories() error {
	for dir, mode := range map[string]os.FileMode{c.dataDir: 0o700, c.runDir: runDirMode} {
		err := os.MkdirAll(dir, mode)
		if err == nil {
			err = os.Chmod(dir, mode)
		}
		if err != nil {
			return fault.New(fault.Internal, fault.CodeDirectoryUnusable,
				fmt.Sprintf("The directory %s cannot be made or opened: run the agent as root, or give it another one with "+
					"--data-dir and --run-dir.", dir), err)
		}
	}
	return nil
}
