package runtime_test

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// seen is what the app saw inside.
func seen(t *testing.T, f *fixture, spec runtime.Spec) map[string]any {
	t.Helper()
	f.start(spec)
	f.wait(spec.ID, runtime.StateExited)
	// Followed, because the shim may still copy the output of a container that has exited.
	r, err := f.rt.Logs(t.Context(), spec.ID, 0, true)
	require.NoError(t, err)
	var out map[string]any
	require.NoError(t, json.NewDecoder(r).Decode(&out))
	require.NoError(t, r.Close())
	return out
}

func TestContainerIsConfined(t *testing.T) {
	f := newFixture(t)
	require.NotContains(t, f.rt.Conditions(), protocol.ConditionNoUserNamespaces)
	spec := f.spec(f.image(), "inspect")
	spec.IP = "10.9.8.7"
	spec.Service.ReadOnlyRoot = true
	spec.Service.Scratch = []*protocol.Scratch{{Path: "/scratch", SizeBytes: 1 << 20}}
	spec.Service.Env = []*protocol.EnvVar{{Name: "BOTH", Value: "manifest"}, {Name: "OWN", Value: "x=y"}}
	in := seen(t, f, spec)
	t.Log(in)

	require.EqualValues(t, 0, in["uid"])
	require.EqualValues(t, 1, in["pid"])
	require.Contains(t, in["uid_map"], "100000      65536")
	require.Contains(t, in["status"], "NoNewPrivs:\t1")
	require.Contains(t, in["status"], "Seccomp:\t2")
	require.Contains(t, in["status"], "CapBnd:\t00000000000004eb")
	require.Contains(t, in["status"], "CapEff:\t00000000000004eb")
	require.Equal(t, "500", in["oom"])
	require.Equal(t, []any{"lo"}, in["links"])
	require.Subset(t, []any{
		"core", "fd", "full", "mqueue", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin",
		"stdout", "tty", "urandom", "zero",
	}, in["devices"])
	require.Equal(t, "nameserver 192.0.2.53\nsearch example.org", in["resolv"])
	require.Contains(t, in["hosts"], "10.9.8.7\tapp-")
	require.Equal(t, "/home", in["cwd"])
	require.Equal(t, []any{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "FROM=image",
		"BOTH=manifest", "OWN=x=y", "HOME=/",
	}, in["env"])
	require.EqualValues(t, 1<<20, in["scratch_bytes"])
	require.Equal(t, "ok", in["write_scratch"])
	require.Equal(t, "ok", in["listen80"])
	for _, refused := range []string{"write_root", "write_sys", "write_proc", "mount", "mknod", "unshare"} {
		require.NotEqual(t, "ok", in[refused], refused)
	}
	require.NotEmpty(t, in["cgroups"])
}

// A service may have /run as a scratch directory: it is the one file system there, and the platform's files lie in it.
func TestAScratchDirectoryMayBeRun(t *testing.T) {
	f := newFixture(t)
	spec := f.spec(f.image(), "wait")
	spec.Service.User = "1234:5678"
	spec.Service.Scratch = []*protocol.Scratch{{Path: "/run", SizeBytes: 1 << 20}}
	spec.Service.Config = &protocol.Config{Json: "{}"}
	built, err := f.rt.BuildSpec(t.Context(), spec)
	require.NoError(t, err)
	var below []string
	for _, m := range built.Mounts {
		if m.Destination == "/run" {
			require.Subset(t, m.Options, []string{"mode=1777", "uid=1234", "gid=5678", "size=1048576"})
		}
		if strings.HasPrefix(m.Destination, "/run") {
			below = append(below, m.Destination)
		}
	}
	require.Equal(t, []string{"/run", "/run/gpuaas"}, below)
	f.start(spec)
	pid := f.wait(spec.ID, runtime.StateRunning).PID
	config, err := os.ReadFile(fmt.Sprintf("/proc/%d/root/run/gpuaas/config.json", pid))
	require.NoError(t, err)
	require.Equal(t, "{}", string(config))
}

// Images of servers have the directories of their sockets and locks in /run, with the owners that these need.
func TestAContainerHasWhatItsImageHasInRun(t *testing.T) {
	eachWay(t, func(t *testing.T, f *fixture, _ string) {
		image := f.registry.push("org/acme/"+f.word, withLayers(t, gzipLayer(t, tarOf(
			t,
			entry{Header: tar.Header{Name: "run/", Typeflag: tar.TypeDir, Mode: 0o755}},
			entry{Header: tar.Header{Name: "run/server/", Typeflag: tar.TypeDir, Mode: 0o750, Uid: 1000, Gid: 100}},
		))))
		require.NoError(t, f.ensure(image))
		spec := f.spec(image, "touch", "/run/server/socket")
		spec.Service.User = "1000:100"
		spec.Service.Config = &protocol.Config{Json: "{}"}
		f.start(spec)
		require.EqualValues(t, 0, f.wait(spec.ID, runtime.StateExited).ExitCode, "%s", f.log(spec.ID))
	}, byMounts, byUnpacking)
}

// Many programs do without any other writable directory.
func TestAReadOnlyRootLeavesRunWritable(t *testing.T) {
	f := newFixture(t)
	spec := f.spec(f.image(), "touch", "/run/lock")
	spec.Service.ReadOnlyRoot = true
	f.start(spec)
	require.EqualValues(t, 0, f.wait(spec.ID, runtime.StateExited).ExitCode, "%s", f.log(spec.ID))
}

func TestContainerCannotTakeTheKernelsEntriesFor32Bits(t *testing.T) {
	if goruntime.GOARCH != "amd64" {
		skip.Except(t, skip.No32Bit, "the test's is one for amd64")
	}
	f := newFixture(t)
	onHost := filepath.Join(t.TempDir(), "app32")
	require.NoError(t, os.WriteFile(onHost, program32(), 0o700))
	var exit *exec.ExitError
	if err := exec.CommandContext(t.Context(), onHost).Run(); errors.Is(err, unix.ENOEXEC) {
		skip.Except(t, skip.No32Bit, "the kernel refuses them")
	} else {
		require.ErrorAs(t, err, &exit)
		require.Equal(t, exit32, exit.ExitCode(), "outside it does what it is meant to")
	}
	spec := f.spec(f.image())
	spec.Service.Command = []string{"/app32"}
	f.start(spec)
	require.EqualValues(t, 128+unix.SIGSYS, f.wait(spec.ID, runtime.StateExited).ExitCode)
}

func TestUserIsWhoTheManifestOrTheImageSays(t *testing.T) {
	f := newFixture(t)
	spec := f.spec(f.image(), "inspect")
	// The image has a /scratch that only root may write to.
	spec.Service.Scratch = []*protocol.Scratch{{Path: "/scratch", SizeBytes: 1 << 20}}
	for who, want := range map[string][]any{
		"":           {0., 0., []any{0.}},
		"jovyan":     {1000., 100., []any{100., 200.}},
		"jovyan:lab": {1000., 200., []any{200.}},
		"1234:5678":  {1234., 5678., []any{5678.}},
		"1000":       {1000., 100., []any{100., 200.}},
	} {
		t.Run(who, func(t *testing.T) {
			spec.ID, spec.Service.User = spec.MemberID+".app."+time.Now().Format("150405.000000000")[7:], who
			in := seen(t, f, spec)
			require.Equal(t, want[:2], []any{in["uid"], in["gid"]}) //nolint:testifylint // the order is right
			require.Equal(t, "ok", in["write_scratch"])
			require.Equal(t, "ok", in["listen80"])
			if who != "" {
				require.Contains(t, in["status"], "CapEff:\t0000000000000000")
				require.Contains(t, in["status"], "CapBnd:\t0000000000000000")
			}
		})
	}
	spec.ID, spec.Service.User = spec.MemberID+".app.x", "nobody-knows"
	_, err := f.rt.Start(t.Context(), spec)
	require.ErrorContains(t, err, "does not know the user")
	spec.Service.User = "70000:0"
	_, err = f.rt.Start(t.Context(), spec)
	require.ErrorContains(t, err, "below 65536")
	spec.Service.User, spec.UserNSPath = "", ""
	_, err = f.rt.Start(t.Context(), spec)
	require.ErrorContains(t, err, "needs a user namespace")
}

// A host that cannot isolate containers is refused, unless its owner asks for it by name.
func TestAHostWithoutIsolationIsRefused(t *testing.T) {
	f := newFixture(t)
	cfg := f.cfg
	cfg.UIDMapBase = math.MaxUint32 // the kernel refuses to map it
	_, err := runtime.Open(t.Context(), cfg)
	require.EqualValues(t, protocol.ConditionNoUserNamespaces, fault.As(err).Code)
	require.True(t, fault.IsPermanent(err))
	cfg.UIDMapBase, cfg.ProcDir = f.cfg.UIDMapBase, t.TempDir()
	require.NoError(t, os.Mkdir(cfg.ProcDir+"/self", 0o700))
	require.NoError(t, os.WriteFile(cfg.ProcDir+"/self/status", []byte("Name:\ttest\nNoNewPrivs:\t0\n"), 0o600))
	_, err = runtime.Open(t.Context(), cfg)
	require.EqualValues(t, protocol.ConditionNoSeccomp, fault.As(err).Code)
	require.True(t, fault.IsPermanent(err))
	cfg.NoUserNamespaces, cfg.NoSeccomp = true, true
	weak, err := runtime.Open(t.Context(), cfg)
	require.NoError(t, err)
	require.Subset(t, weak.Conditions(), []string{protocol.ConditionNoUserNamespaces, protocol.ConditionNoSeccomp})
	require.NoError(t, weak.Close())
}

// The kernel takes a profile from programs with this capability alone (aa_policy_admin_capable in security/apparmor).
func TestTheUnitLetsTheAgentLoadAnAppArmorProfile(t *testing.T) {
	unit, err := os.ReadFile("../../../systemd/gpuaas-agent.service")
	require.NoError(t, err)
	require.Regexp(t, `(?m)^CapabilityBoundingSet=.*\bCAP_MAC_ADMIN\b`, string(unit))
}

// The profile itself is containerd's; most kernels of these tests have no AppArmor.
func TestContainersHaveAnAppArmorProfileWhereTheKernelHasIt(t *testing.T) {
	f := newFixture(t)
	image := f.image()
	var loaded []string
	with := func(available bool, err error) *runtime.Runtime {
		cfg := f.cfg
		cfg.LoadAppArmor = func(profile string) (bool, error) {
			loaded = append(loaded, profile)
			return available, err
		}
		rt, openErr := runtime.Open(t.Context(), cfg)
		require.NoError(t, openErr)
		t.Cleanup(func() { require.NoError(t, rt.Close()) })
		return rt
	}
	rt := with(true, nil)
	require.NotContains(t, rt.Conditions(), protocol.ConditionNoAppArmor)
	spec, err := rt.BuildSpec(t.Context(), f.spec(image, "wait"))
	require.NoError(t, err)
	require.Equal(t, f.word+"-container", spec.Process.ApparmorProfile)
	require.Equal(t, []string{f.word + "-container"}, loaded)

	for name, rt := range map[string]*runtime.Runtime{
		"the kernel has none": with(false, nil), "it cannot be loaded": with(true,
			errors.New("apparmor_parser: exit status 1")),
	} {
		require.Contains(t, rt.Conditions(), protocol.ConditionNoAppArmor, name)
		spec, err := rt.BuildSpec(t.Context(), f.spec(image, "wait"))
		require.NoError(t, err)
		require.Empty(t, spec.Process.ApparmorProfile, name)
	}
}

func TestASharedFileSystemIsSaid(t *testing.T) {
	f := newFixture(t)
	require.Contains(t, f.rt.Conditions(), protocol.ConditionSharedDisk, "the test's containerd and logs are both in "+
		"the directory for temporary files")
	cfg := f.cfg
	cfg.LogDir = t.TempDir()
	require.NoError(t, unix.Mount("tmpfs", cfg.LogDir, "tmpfs", 0, "size=1m"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(cfg.LogDir, 0)) })
	apart, err := runtime.Open(t.Context(), cfg)
	require.NoError(t, err)
	require.NotContains(t, apart.Conditions(), protocol.ConditionSharedDisk)
	require.NoError(t, apart.Close())
}

func TestWithoutUserNamespacesItRunsAndSaysSo(t *testing.T) {
	f := newFixture(t, func(c *runtime.Config) { c.NoUserNamespaces = true })
	require.Contains(t, f.rt.Conditions(), protocol.ConditionNoUserNamespaces)
	spec := f.spec(f.image(), "inspect")
	in := seen(t, f, spec)
	require.Contains(t, in["uid_map"], "4294967295")
	require.Equal(t, []any{"lo"}, in["links"])
	require.NotEqual(t, "ok", in["write_sys"])
	code, err := f.rt.Exec(t.Context(), f.startWaiting(spec.Service.Image), []string{"/app", "exit", "4"}, time.Minute)
	require.NoError(t, err)
	require.Equal(t, 4, code)
	c, err := f.rt.Get(t.Context(), spec.ID)
	require.NoError(t, err)
	require.False(t, c.UserNamespace)
}

func TestSameRunHasSameSpecToTheByte(t *testing.T) {
	f := newFixture(t)
	spec := f.spec(f.image(), "wait")
	one, err := f.rt.BuildSpec(t.Context(), spec)
	require.NoError(t, err)
	two, err := f.open().BuildSpec(t.Context(), spec)
	require.NoError(t, err)
	a, err := json.Marshal(one)
	require.NoError(t, err)
	b, err := json.Marshal(two)
	require.NoError(t, err)
	require.Equal(t, string(a), string(b))
	f.start(spec)
	c, err := f.daemon.Client(t).ContainerService().Get(f.ns(), spec.ID)
	require.NoError(t, err)
	require.JSONEq(t, string(a), string(c.Spec.GetValue()))
	require.Equal(t, string(a), string(c.Spec.GetValue()))
}

func TestLimitsAreEnforced(t *testing.T) {
	f := newFixture(t)
	image := f.image()
	spec := f.spec(image, "eat", "200")
	f.start(spec)
	c := f.wait(spec.ID, runtime.StateExited)
	require.Equal(t, uint32(137), c.ExitCode)
	require.True(t, c.OOMKilled)

	spec = f.spec(image, "wait")
	f.start(spec)
	require.Equal(t, "50000", f.cgroupFile("cpu", spec.ID, "cpu.cfs_quota_us", "cpu.max"))
	require.Equal(t, "64", f.cgroupFile("pids", spec.ID, "pids.max", "pids.max"))
	require.Equal(t, "67108864", f.cgroupFile("memory", spec.ID, "memory.limit_in_bytes", "memory.max"))
	spec.Service.Resources.ShmBytes = 3 << 20
	built, err := f.rt.BuildSpec(t.Context(), spec)
	require.NoError(t, err)
	require.True(t, slices.ContainsFunc(built.Mounts, func(m specs.Mount) bool {
		return m.Destination == "/dev/shm" && slices.Contains(m.Options, "size=3145728")
	}))

	spec = f.spec(image, "exit", "0")
	f.start(spec)
	c = f.wait(spec.ID, runtime.StateExited)
	require.False(t, c.OOMKilled)
	require.Zero(t, c.ExitCode)
}

// An image says where its program begins, and is signed by the publisher only as a whole (CVE-2024-21626).
func TestAnImagesOwnWorkingDirectoryIsNotInKernelFiles(t *testing.T) {
	f := newFixture(t)
	for _, dir := range []string{"/proc/self/fd/7", "proc/self/fd/7", "/home/../sys/fs"} {
		spec := f.spec(f.image(func(c *v1.Config) { c.WorkingDir = dir }), "wait")
		_, err := f.rt.Start(t.Context(), spec)
		require.ErrorContains(t, err, "bad_workload", dir)
		left, err := f.rt.Leftovers(t.Context(), spec.MemberID)
		require.NoError(t, err)
		require.Empty(t, left)
	}
}
