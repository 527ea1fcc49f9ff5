package runtime_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/cdi"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// What opening a device node says. No driver has the numbers of render nodes on the machine of these tests: where the
// cgroup allows them, the kernel finds no driver; where it does not, it refuses before it searches for one.
const (
	noDriver = "no such device or address"
	refused  = "operation not permitted"
)

// withDevices is a run of the app with one accelerator: the numbers of /dev/fuse and of a render node without driver.
func (f *fixture) withDevices(image string, args ...string) runtime.Spec {
	f.t.Helper()
	spec := f.spec(image, args...)
	spec.Service.Resources.AcceleratorIds = []string{"GPU-a"}
	spec.Devices = cdi.Edits{
		Claims: []string{"GPU-a"},
		Nodes: []cdi.Node{
			{Path: "/dev/kfd", Major: 10, Minor: 229},
			{Path: "/dev/dri/renderD128", Major: 226, Minor: 128},
		},
	}
	return spec
}

func TestLaw10AContainerOpensItsAcceleratorsAndNoOthers(t *testing.T) {
	for name, noUserNamespaces := range map[string]bool{"user namespaces": false, "no user namespaces": true} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, func(c *runtime.Config) { c.NoUserNamespaces = noUserNamespaces })
			image := f.image(func(c *v1.Config) {
				c.Env = append(c.Env, "NVIDIA_VISIBLE_DEVICES=all", "LD_LIBRARY_PATH=/opt/own")
			})
			library := filepath.Join(f.cfg.StateDir, "libfake.so.1")
			require.NoError(t, os.WriteFile(library, []byte("a library"), 0o644))
			var last runtime.Spec
			for _, user := range []string{"", "jovyan"} {
				if last.ID != "" {
					require.NoError(t, f.rt.Remove(t.Context(), last.ID))
				}
				spec := f.withDevices(image, "devices", "/dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD129", "/dev/null")
				spec.Devices.Mounts = []cdi.Mount{{Source: library, Destination: "/usr/lib/driver/libfake.so.1"}}
				spec.Devices.LibraryDirs = []string{"/usr/lib/driver"}
				spec.Service.User = user
				spec.Service.Scratch = []*protocol.Scratch{{Path: "/scratch", SizeBytes: 1 << 20}}
				requireOwnDevices(t, seen(t, f, spec))
				last = spec
			}
			without := seen(t, f, f.spec(image, "devices", "/dev/kfd"))
			require.Contains(t, without["/dev/kfd"], "no such file")
			require.Contains(t, without["env"], "NVIDIA_VISIBLE_DEVICES=void", "a hook of the host adds no GPUs")
		})
	}
}

func requireOwnDevices(t *testing.T, in map[string]any) {
	t.Helper()
	if fuse := in["/dev/kfd"]; fuse != "ok" {
		require.Contains(t, fuse, noDriver)
	}
	require.Contains(t, in["/dev/dri/renderD128"], noDriver, "the cgroup allows it")
	require.Contains(t, in["/dev/dri/renderD129"], "no such file", "another accelerator's node is not there")
	require.Equal(t, "ok", in["/dev/null"])
	require.Contains(t, in["mknod"], refused)
	require.NotEqual(t, "ok", in["mknod in dev"])
	var nodes []string
	for _, n := range in["nodes"].([]any) {
		if path := n.(string); !slices.Contains(standardNodes(), path) {
			nodes = append(nodes, path)
		}
	}
	require.Equal(t, []string{"/dev/dri/renderD128", "/dev/kfd"}, nodes)
	require.Equal(t, "a library", in["library"])
	require.NotEqual(t, "ok", in["write library"])
	require.Contains(t, in["env"], "LD_LIBRARY_PATH=/opt/own:/usr/lib/driver")
	require.Contains(t, in["env"], "NVIDIA_VISIBLE_DEVICES=void")
}

func standardNodes() []string {
	return []string{
		"/dev/console", "/dev/full", "/dev/null", "/dev/ptmx", "/dev/pts/ptmx", "/dev/random", "/dev/tty", "/dev/urandom",
		"/dev/zero",
	}
}

// The kernel itself is asked: a process in the container's cgroup, which is not confined otherwise.
func TestTheCgroupAllowsOnlyTheContainersDevices(t *testing.T) {
	f := newFixture(t)
	spec := f.withDevices(f.image(), "wait")
	f.start(spec)
	dir := filepath.Join("/dev/gpuaas-"+f.word, "probe")
	require.NoError(t, os.Mkdir(dir, 0o700))
	open := func(major, minor uint32) string {
		t.Helper()
		node := filepath.Join(dir, fmt.Sprintf("%d_%d", major, minor))
		require.NoError(t, unix.Mknod(node, unix.S_IFCHR|0o600, int(unix.Mkdev(major, minor))))
		cgroup := "/sys/fs/cgroup" + runtime.CgroupOf("/"+f.word, spec.ID)
		if _, err := os.Stat(cgroup); err != nil {
			cgroup = "/sys/fs/cgroup/devices" + runtime.CgroupOf("/"+f.word, spec.ID)
		}
		out, _ := exec.CommandContext(t.Context(), "sh", "-c", "echo $$ > "+cgroup+"/cgroup.procs && : < "+node).
			CombinedOutput()
		return strings.ToLower(string(out))
	}
	require.Contains(t, open(226, 128), noDriver)
	require.Contains(t, open(226, 129), refused)
	require.Contains(t, open(226, 0), refused, "the display")
	require.Contains(t, open(195, 0), refused, "an NVIDIA GPU")
	require.Contains(t, open(10, 237), refused)
	require.NotContains(t, open(1, 3), refused)
}

// A rule that is taken away is seen from within the container alone: nothing about the device has changed.
func TestADeviceThatTheContainerCannotOpenIsNamed(t *testing.T) {
	f := newFixture(t)
	spec, plain := f.withDevices(f.image(), "wait"), f.spec(f.image(), "wait")
	spec.Service.User = "jovyan"
	f.start(spec)
	f.start(plain)
	for _, id := range []string{spec.ID, plain.ID} {
		lost, err := f.rt.LostDevices(t.Context(), id)
		require.NoError(t, err)
		require.Empty(t, lost)
	}
	deny := "/sys/fs/cgroup/devices" + runtime.CgroupOf("/"+f.word, spec.ID) + "/devices.deny"
	if _, err := os.Stat(deny); err != nil {
		skip.Except(t, skip.CgroupV2, "")
	}
	require.NoError(t, os.WriteFile(deny, []byte("c 226:128 rwm"), 0))
	lost, err := f.rt.LostDevices(t.Context(), spec.ID)
	require.NoError(t, err)
	require.Equal(t, "/dev/dri/renderD128: operation not permitted", lost)
	_, err = f.rt.LostDevices(t.Context(), "none.1")
	require.Error(t, err)
}

// The number of its process may be another process's by then, whose files the container's user must not open.
func TestTheRootOfAContainerThatHasEndedIsNotOpened(t *testing.T) {
	f := newFixture(t)
	spec := f.withDevices(f.image(), "exit", "0")
	f.start(spec)
	ended := f.wait(spec.ID, runtime.StateExited)
	f.cfg.ProcDir = t.TempDir()
	require.NoError(t, os.Symlink("/proc/self", f.cfg.ProcDir+"/self"))
	require.NoError(t, os.MkdirAll(fmt.Sprint(f.cfg.ProcDir, "/", ended.PID, "/root"), 0o700))
	_, err := f.open().LostDevices(t.Context(), spec.ID)
	require.EqualValues(t, "container_missing", fault.As(err).Code)
}

func TestLaw14ANodeGivesAnAcceleratorToOneContainer(t *testing.T) {
	f := newFixture(t)
	image := f.image()
	var started sync.WaitGroup
	errs, specs := make([]error, 4), make([]runtime.Spec, 4)
	for i := range errs {
		specs[i] = f.withDevices(image, "wait")
		started.Go(func() { _, errs[i] = f.rt.Start(t.Context(), specs[i]) })
	}
	started.Wait()
	winner := slices.Index(errs, nil)
	require.GreaterOrEqual(t, winner, 0)
	for i, err := range errs {
		if i != winner {
			require.Equal(t, agent.CodeAcceleratorInUse, fault.As(err).Code, "%v", err)
		}
	}
	holder := specs[winner]
	nodes, err := os.ReadDir("/dev/gpuaas-" + f.word)
	require.NoError(t, err)
	require.Len(t, nodes, 1, "what was refused leaves no nodes")

	again, another := f.open(), f.withDevices(image, "wait")
	c, err := again.Get(t.Context(), holder.ID)
	require.NoError(t, err)
	require.Equal(t, []string{"GPU-a"}, c.AcceleratorIDs, "a restarted agent knows it from the container")
	_, err = again.Start(t.Context(), another)
	require.Equal(t, agent.CodeAcceleratorInUse, fault.As(err).Code, "%v", err)
	require.NoError(t, again.Stop(t.Context(), holder.ID, 0))
	_, err = again.Start(t.Context(), another)
	require.Equal(t, agent.CodeAcceleratorInUse, fault.As(err).Code, "its record still holds it")
	require.NoError(t, again.Remove(t.Context(), holder.ID))
	_, err = again.Start(t.Context(), another)
	require.NoError(t, err)
}

func TestLaw14OnlyContainersOfOneOrgShareAnAccelerator(t *testing.T) {
	f := newFixture(t)
	image := f.image()
	start := func(org, sharing, id string, shared ...cdi.Slice) (runtime.Spec, error) {
		spec := f.withDevices(image, "wait")
		spec.OrgID, spec.Devices.Claims, spec.Devices.Shared = org, []string{id}, shared
		spec.Service.Resources.AcceleratorIds, spec.Service.Resources.AcceleratorSharing = []string{id}, sharing
		_, err := f.rt.Start(t.Context(), spec)
		return spec, err
	}
	const slices, mps = protocol.SharingTimeSlices, protocol.SharingMPS
	gpu := cdi.Slice{Accelerator: "GPU-a", Sharing: slices}
	first, err := start("acme", slices, "GPU-a-ts4-0", gpu)
	require.NoError(t, err)
	second, err := start("acme", slices, "GPU-a-ts4-1", gpu)
	require.NoError(t, err)
	refused := func(why string, err error) {
		t.Helper()
		require.Equal(t, agent.CodeAcceleratorInUse, fault.As(err).Code, "%s: %v", why, err)
	}
	_, err = start("acme", slices, "GPU-a-ts4-1", gpu)
	refused("a slice has one container", err)
	_, err = start("globex", slices, "GPU-a-ts4-2", gpu)
	refused("another org", err)
	_, err = start("acme", mps, "GPU-a-mps4-2", cdi.Slice{Accelerator: "GPU-a", Sharing: mps})
	refused("another way of sharing", err)
	_, err = start("acme", "", "GPU-a")
	refused("the whole GPU", err)
	_, err = start("acme", "", "GPU-a-ts4-2", gpu)
	require.Equal(t, "bad_workload", string(fault.As(err).Code), "its document does not say that it shares: %v", err)

	require.NoError(t, f.rt.Remove(t.Context(), first.ID))
	_, err = start("globex", slices, "GPU-a-ts4-2", gpu)
	refused("the second is still there", err)
	require.NoError(t, f.rt.Remove(t.Context(), second.ID))
	third, err := start("globex", slices, "GPU-a-ts4-2", gpu)
	require.NoError(t, err)
	require.NoError(t, f.rt.Remove(t.Context(), third.ID))
	_, err = start("acme", "", "GPU-a")
	require.NoError(t, err)
	_, err = start("acme", slices, "GPU-a-ts4-0", gpu)
	refused("a container has the whole GPU", err)
}

func TestAContainerWithASliceReachesItsMPSDaemon(t *testing.T) {
	f := newFixture(t)
	dir := filepath.Dir(f.cfg.StateDir)
	spec := f.withDevices(f.image(), "wait")
	spec.OrgID, spec.Service.Resources.AcceleratorSharing = "acme", protocol.SharingMPS
	spec.Devices.Shared = []cdi.Slice{{Accelerator: "GPU-b", Sharing: protocol.SharingMPS}}
	spec.Devices.MPS = &cdi.MPS{
		PipeDir: filepath.Join(dir, "pipe"), ShmDir: filepath.Join(dir, "shm"), ThreadPercent: 25, MemoryMiB: 512,
	}
	for _, d := range []string{spec.Devices.MPS.PipeDir, spec.Devices.MPS.ShmDir} {
		require.NoError(t, os.Mkdir(d, 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(d, "of-the-daemon"), nil, 0o644))
	}
	run, err := f.rt.Start(t.Context(), spec)
	require.NoError(t, err)
	f.waitForLog(spec.ID, "ready") // until then it may still be runc's process
	root := fmt.Sprintf("/proc/%d/root", run.PID)
	require.FileExists(t, root+"/run/nvidia-mps/of-the-daemon")
	require.FileExists(t, root+"/dev/shm/of-the-daemon")
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", run.PID))
	require.NoError(t, err)
	require.Subset(t, strings.Split(string(env), "\x00"), []string{
		"CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25",
		"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=512M",
	})
}

func TestNodesThatACrashLeftAreFoundAndRemoved(t *testing.T) {
	f := newFixture(t)
	spec := f.withDevices(f.image(), "wait")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	pending, err := f.rt.Prepare(ctx, spec)
	require.NoError(t, err)
	pending.Close()
	require.NoError(t, f.daemon.Client(t).ContainerService().Delete(f.ns(), spec.ID))
	left, err := f.rt.Leftovers(ctx, spec.MemberID)
	require.NoError(t, err)
	require.Contains(t, left, protocol.AbsentDeviceClaim+" "+spec.ID)
	require.NoError(t, f.rt.RemoveMember(ctx, spec.MemberID))
	require.NoDirExists(t, "/dev/gpuaas-"+f.word+"/"+spec.ID)
}

func TestEditsMustBeThoseOfTheService(t *testing.T) {
	f := newFixture(t)
	image := f.image()
	for name, change := range map[string]func(*runtime.Spec){
		"not named":      func(s *runtime.Spec) { s.Service.Resources.AcceleratorIds = nil },
		"another":        func(s *runtime.Spec) { s.Service.Resources.AcceleratorIds = []string{"GPU-b"} },
		"no such node":   func(s *runtime.Spec) { s.Devices.Nodes[0].Path = "/dev/mem" },
		"over the image": func(s *runtime.Spec) { s.Devices.Mounts = []cdi.Mount{{Source: "/etc", Destination: "/etc"}} },
	} {
		spec := f.withDevices(image, "wait")
		change(&spec)
		_, err := f.rt.Start(t.Context(), spec)
		require.ErrorContains(t, err, "bad_workload", name)
	}
}
