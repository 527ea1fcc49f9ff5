package runtime_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/accelerator"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/e2e/nvmltest"
	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/pkg/appkit"
	"github.com/gpuaas/gpuaas/protocol"
)

// realGPUs is the machine's own driver with its GPUs, for `make test-gpu`. keepMode: the compute mode of GPUs stays as
// it is, which MPS makes exclusive.
type realGPUs struct {
	cfg      accelerator.Config
	keepMode bool
}

func onRealGPUs(t *testing.T) realGPUs {
	t.Helper()
	return realGPUs{keepMode: nvmltest.RequireRealGPUs(t), cfg: accelerator.Config{
		Timeout: time.Minute, Interval: time.Second,
		ResetProgram: "/bin/false", // a test resets no real GPU
	}}
}

// scan takes the inventory, and skips the test where it has no GPU of this vendor; "" is any.
func (g realGPUs) scan(t *testing.T, vendor string) (*accelerator.Inventory, []*protocol.Accelerator) {
	t.Helper()
	g.cfg.NVML = nvmltest.Program(t)
	if g.keepMode {
		g.cfg.NVML = nvmltest.KeepingMode(t, g.cfg.NVML)
	}
	i := scan(t, g.cfg)
	var all []*protocol.Accelerator
	for _, a := range i.List() {
		if vendor == "" || a.GetVendor() == vendor {
			all = append(all, a)
		}
	}
	if len(all) == 0 {
		skip.Except(t, skip.NoGPU, fmt.Sprintf("NOT TESTED, no driver serves one: no /sys/module/nvidia with a GPU, nothing "+
			"in /sys/bus/pci/drivers/amdgpu; conditions %v", i.Conditions()))
	}
	return i, all
}

// computerImage has a program that computes on a GPU, and the system's libraries that it and the driver need.
func (f *fixture) computerImage(i *accelerator.Inventory, id string) string {
	f.t.Helper()
	edits, err := i.Edits(f.t.Context(), []string{id}, "org")
	require.NoError(f.t, err)
	var libraries []string
	for _, m := range edits.Mounts {
		if name := filepath.Base(m.Source); strings.HasPrefix(name, "libcuda.so") ||
			strings.HasPrefix(name, "libnvidia-ptxjitcompiler.so") {
			libraries = append(libraries, m.Source)
		}
	}
	files := nvmltest.ComputerFiles(f.t, libraries...)
	img, err := appkit.ImageFromFiles(files, appkit.ImageConfig{Entrypoint: []string{"/compute"}})
	require.NoError(f.t, err)
	ref := f.registry.push("org/acme/"+f.word, img)
	require.NoError(f.t, f.ensure(ref))
	return ref
}

// computer is a run of that program with these accelerators.
func (f *fixture) computer(
	image string, i *accelerator.Inventory, purpose, sharing string, ids ...string,
) runtime.Spec {
	f.t.Helper()
	spec := f.spec(image)
	spec.Service.Command, spec.OrgID = []string{"/compute", purpose}, "org"
	spec.Service.Resources = &protocol.Resources{
		CpuMillis: 4000, MemoryBytes: 8 << 30, Pids: 256, AcceleratorIds: ids, AcceleratorSharing: sharing,
	}
	var err error
	spec.Devices, err = i.Edits(f.t.Context(), ids, "org")
	require.NoError(f.t, err)
	return spec
}

// output is what a container printed that has ended.
func (f *fixture) output(spec runtime.Spec) string {
	f.t.Helper()
	f.wait(spec.ID, runtime.StateExited)
	r, err := f.rt.Logs(f.t.Context(), spec.ID, 0, true)
	require.NoError(f.t, err)
	defer func() { require.NoError(f.t, r.Close()) }()
	var out []byte
	for block := make([]byte, 4096); ; {
		n, err := r.Read(block)
		out = append(out, block[:n]...)
		if err != nil {
			return string(out)
		}
	}
}

func (f *fixture) remove(specs ...runtime.Spec) {
	f.t.Helper()
	for _, spec := range specs {
		require.NoError(f.t, f.rt.Remove(f.t.Context(), spec.ID))
	}
}

// requireOwnNodes: the container opens all nodes that it is given, with the real driver behind them, and finds no
// other. A container without an accelerator finds none, and no container makes one.
func requireOwnNodes(t *testing.T, f *fixture, i *accelerator.Inventory, id string) {
	t.Helper()
	edits, err := i.Edits(t.Context(), []string{id}, "org")
	require.NoError(t, err)
	args := []string{"devices"}
	for _, n := range edits.Nodes {
		args = append(args, n.Path)
	}
	image := f.image()
	spec := f.spec(image, args...)
	spec.Devices, spec.Service.Resources.AcceleratorIds = edits, []string{id}
	in := seen(t, f, spec)
	for _, path := range args[1:] {
		require.Equal(t, "ok", in[path], path)
	}
	require.Subset(t, append(standardNodes(), args[1:]...), in["nodes"])
	require.Contains(t, in["mknod"], refused)
	without := f.spec(image, args...)
	in = seen(t, f, without)
	for _, path := range args[1:] {
		require.Contains(t, in[path], "no such file", path)
	}
	f.remove(spec, without)
	t.Logf("%s: opened %s, which no other container finds", id, strings.Join(args[1:], ", "))
}

func TestContainersOnRealGPUsUseThoseTheyWereGiven(t *testing.T) {
	g := onRealGPUs(t)
	f := newFixture(t) // before the first temporary directory of the test: it searches for what the test leaves
	i, all := g.scan(t, "")
	for _, a := range all {
		t.Logf("%s %s at %s, %d bytes, NUMA node %d, driver %s, runtime %s, health %s %s", a.GetModel(), a.GetId(),
			a.GetPciAddress(), a.GetMemoryBytes(), a.GetNumaNode(), a.GetDriverVersion(), a.GetRuntimeVersion(),
			a.GetHealth(), a.GetHealthReason())
		ids := []string{a.GetId()}
		if len(a.GetPartitions()) > 0 {
			ids = nil
		}
		for _, p := range a.GetPartitions() {
			ids = append(ids, p.GetId())
		}
		for _, id := range ids {
			requireOwnNodes(t, f, i, id)
			if a.GetVendor() != protocol.VendorNVIDIA {
				continue
			}
			image := f.computerImage(i, id)
			spec := f.computer(image, i, "check", "", id)
			f.start(spec)
			nvmltest.RequireComputed(t, f.output(spec), id, a.GetMemoryBytes())
			f.remove(spec)
			none := f.computer(image, i, "check", "")
			f.start(none)
			require.Contains(t, f.output(none), "libcuda.so.1: cannot open shared object file")
			f.remove(none)
		}
	}
}

// sharedRealGPU is the first of the machine's NVIDIA GPUs, shared in this way, and two of its slices.
func (g realGPUs) sharedRealGPU(t *testing.T, mode string) (*accelerator.Inventory, *protocol.Accelerator, []string) {
	t.Helper()
	var err error
	g.cfg.Sharing, err = accelerator.ParseSharing("all=" + mode)
	require.NoError(t, err)
	i, all := g.scan(t, protocol.VendorNVIDIA)
	require.NotEmpty(t, all[0].GetPartitions(), "%s cannot be shared", all[0].GetModel())
	var ids []string
	for _, p := range all[0].GetPartitions() {
		ids = append(ids, p.GetId())
	}
	return i, all[0], ids
}

func TestContainersOnRealGPUsShareOneByTimeSlices(t *testing.T) {
	g := onRealGPUs(t)
	f := newFixture(t)
	i, gpu, slices := g.sharedRealGPU(t, "time_slices:4")
	image := f.computerImage(i, slices[0])
	held := f.computer(image, i, "hold", protocol.SharingTimeSlices, slices[0])
	f.start(held)
	f.waitForLog(held.ID, "computed on 1 GPUs")
	other := f.computer(image, i, "check", protocol.SharingTimeSlices, slices[1])
	f.start(other)
	nvmltest.RequireComputed(t, f.output(other), gpu.GetId(), gpu.GetMemoryBytes())
	c, err := f.rt.Get(t.Context(), held.ID)
	require.NoError(t, err)
	require.Equal(t, runtime.StateRunning, c.State, "the first one computes on")
	f.remove(held, other)
}

// Server, clients and their memory are NVIDIA's own; each client runs in a user namespace.
func TestContainersOnRealGPUsShareOneByMPS(t *testing.T) {
	g := onRealGPUs(t)
	f := newFixture(t)
	//nolint:usetesting // a socket's path is short
	dir, err := os.MkdirTemp("", f.word)
	require.NoError(t, err)
	g.cfg.MPSDir, g.cfg.MPSIdle = dir, time.Hour
	t.Cleanup(func() {
		require.NoError(t, accelerator.StopMPS(context.Background(), g.cfg))
		require.NoError(t, os.RemoveAll(dir))
	})
	i, gpu, slices := g.sharedRealGPU(t, "mps:4")
	image := f.computerImage(i, slices[0])
	var held []runtime.Spec
	for _, id := range slices[:2] {
		spec := f.computer(image, i, "hold", protocol.SharingMPS, id)
		f.start(spec)
		f.waitForLog(spec.ID, "computed on 1 GPUs")
		held = append(held, spec)
	}
	requireClients(t, held[0].Devices.MPS.PipeDir, len(held))
	limited := f.computer(image, i, "limit", protocol.SharingMPS, slices[2])
	f.start(limited)
	out := f.output(limited)
	nvmltest.RequireComputed(t, out, gpu.GetId(), gpu.GetMemoryBytes())
	require.Contains(t, out, "code 2 after", "CUDA_ERROR_OUT_OF_MEMORY")
	var gib uint64
	_, err = fmt.Sscanf(out[strings.Index(out, "code 2"):], "code 2 after %d GiB", &gib)
	require.NoError(t, err, out)
	require.LessOrEqual(t, gib<<30, gpu.GetMemoryBytes()/4)
	t.Logf("of %d bytes, a client of MPS with a quarter says:\n%s", gpu.GetMemoryBytes(), out)
	for _, spec := range held {
		c, err := f.rt.Get(t.Context(), spec.ID)
		require.NoError(t, err)
		require.Equal(t, runtime.StateRunning, c.State, "it computes on")
	}
	if g.keepMode {
		t.Log("NOT TESTED: that a program without MPS is refused, because the compute mode stayed as it was")
	} else {
		f.requireOnlyMPS(image, i, slices[3])
	}
	f.remove(append(held, limited)...)
}

// requireClients: the daemon has one server, with this many clients.
func requireClients(t *testing.T, pipeDir string, clients int) {
	t.Helper()
	ask := func(command string) []string {
		control := exec.CommandContext(t.Context(), "nvidia-cuda-mps-control")
		control.Env = append(os.Environ(), "CUDA_MPS_PIPE_DIRECTORY="+pipeDir)
		control.Stdin = strings.NewReader(command + "\n")
		out, err := control.CombinedOutput()
		require.NoError(t, err, "%s", out)
		return strings.Fields(string(out))
	}
	servers := ask("get_server_list")
	require.Len(t, servers, 1)
	require.Len(t, ask("get_client_list "+servers[0]), clients)
	status, err := os.ReadFile("/proc/" + servers[0] + "/status")
	require.NoError(t, err)
	for line := range strings.Lines(string(status)) {
		if strings.HasPrefix(line, "Uid:") {
			t.Logf("one MPS server, %s, with %d clients", strings.Join(strings.Fields(line), " "), clients)
		}
	}
}

// requireOnlyMPS: a container that has a slice and does not ask MPS gets nothing of the GPU.
func (f *fixture) requireOnlyMPS(image string, i *accelerator.Inventory, slice string) {
	f.t.Helper()
	past := f.computer(image, i, "check", protocol.SharingMPS, slice)
	past.Service.Env = append(past.Service.Env, &protocol.EnvVar{Name: "CUDA_MPS_PIPE_DIRECTORY", Value: "/nowhere"})
	past.Devices.MPS = nil
	f.start(past)
	require.Regexp(f.t, `cu\w+: code (46|201|801|805)`, f.output(past))
	f.remove(past)
}

// The driver writes the fault into the kernel's log, where the agent reads that it was the app's: the GPU goes on.
func TestContainersOnRealGPUsMayFaultWithoutLosingThem(t *testing.T) {
	g := onRealGPUs(t)
	f := newFixture(t)
	i, all := g.scan(t, protocol.VendorNVIDIA)
	id := all[0].GetId()
	if len(all[0].GetPartitions()) > 0 {
		id = all[0].GetPartitions()[0].GetId()
	}
	image := f.computerImage(i, id)
	faulty := f.computer(image, i, "fault", "", id)
	f.start(faulty)
	require.Regexp(t, `address \w+: code 7\d\d`, f.output(faulty), "CUDA_ERROR_ILLEGAL_ADDRESS or its like")
	reason := func() string {
		for _, a := range i.List() {
			if a.GetId() == all[0].GetId() {
				return a.GetHealth() + " " + a.GetHealthReason()
			}
		}
		return protocol.HealthMissing
	}
	require.Eventually(t, func() bool { return strings.Contains(reason(), "Xid") }, time.Minute, 100*time.Millisecond)
	require.Regexp(t, `^ok Xid \d+ of the app$`, reason())
	require.Zero(t, i.State(id))
	f.remove(faulty)
	again := f.computer(image, i, "check", "", id)
	f.start(again)
	require.Contains(t, f.output(again), "computed on 1 GPUs")
	f.remove(again)
	t.Logf("%s after the fault: %s", all[0].GetModel(), reason())
}
