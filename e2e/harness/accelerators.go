package harness

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/rogpeppe/go-internal/txtar"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/e2e/nvmltest"
	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// Machine unpacks the sysfs of a machine with AMD GPUs, an archive of package accelerator, and has a node find its
// accelerators there. It returns the machine's root.
func (w *Testbed) Machine(c *devcluster.AgentConfig, archive string) (root string) {
	w.T.Helper()
	root = c.Dir + "-machine"
	a, err := txtar.ParseFile(filepath.Join(Source(w.T), "agent/internal/accelerator/testdata", archive))
	require.NoError(w.T, err)
	require.NoError(w.T, txtar.Write(a, root))
	c.ExtraArgs = append(c.ExtraArgs, "--accelerator-root", root)
	return root
}

// NVIDIAModel is the model of the GPUs of NVIDIAMachine.
const NVIDIAModel = "NVIDIA H100 80GB HBM3"

// NVIDIAGPUs are the GPUs of NVIDIAMachine; an id ends in the GPU's minor number.
func NVIDIAGPUs() []string {
	const id = "GPU-8f6d2e1a-73c1-4a0e-9d53-0c5b1f2a6d0"
	return []string{id + "0", id + "1", id + "2"}
}

// NVIDIAMachine gives a node three GPUs of NVIDIA's, by a library and a driver that are not NVIDIA's.
func (w *Testbed) NVIDIAMachine(c *devcluster.AgentConfig) {
	w.T.Helper()
	library, driver, machine := nvmltest.New(w.T), c.Dir+"-driver", c.Dir+"-machine"
	lines := []string{"driver " + nvmltest.Version + " 12040"}
	for n, id := range NVIDIAGPUs() {
		lines = append(lines, fmt.Sprintf("gpu %s %x 81559 16896 ok %s", id, 0x1b+n, NVIDIAModel))
	}
	library.Set(lines...)
	library.Driver(driver, len(NVIDIAGPUs()))
	require.NoError(w.T, os.MkdirAll(filepath.Join(machine, "sys/module/nvidia"), 0o755))
	c.Env = append(c.Env, library.Env...)
	c.ExtraArgs = append(c.ExtraArgs, "--accelerator-root", machine, "--nvidia-driver-root", driver, "--nvml",
		filepath.Join(Binaries(w.T), "gpuaas-nvml"))
}

// NeedsNVML skips a test where make build found no C compiler and made no program that asks NVIDIA's library.
func NeedsNVML(t *testing.T) {
	t.Helper()
	if !HasNVML(t) {
		skip.Lacking(t, "make build found no gcc: there is no gpuaas-nvml")
	}
}

// HasNVML reports whether there is that program.
func HasNVML(t *testing.T) bool {
	t.Helper()
	_, err := os.Stat(filepath.Join(Binaries(t), "gpuaas-nvml"))
	return err == nil
}

// NewGPUPlatform is a platform whose node has the AMD GPUs of a machine, without an allocation. Version 2.0.0 of the
// app needs a GPU.
func NewGPUPlatform(t *testing.T, archive string) (w *Testbed, machine string) {
	t.Helper()
	w = New(t)
	w.StartContainerd()
	w.StartHub(w.HubConfig())
	w.NewTenant("acme")
	c := w.AgentConfig("node")
	machine = w.Machine(&c, archive)
	w.Agent = w.StartAgent(c)
	w.ShipApp()
	w.ShipVersion("2.0.0", "accelerator: none", "accelerator: amd", "  compatibility:\n",
		"  compatibility:\n    min_gpu_count: 1\n")
	return w, machine
}

// AllocateGPUs reserves a slice with this many GPUs of a model, or of any where that is empty, on a node, or on any.
func (w *Testbed) AllocateGPUs(node, model string, count int32, memoryMiB int64) client.Allocation {
	w.T.Helper()
	a, err := client.Read[client.Allocation](w.Admin().CreateAllocation(w.Ctx, w.Tenant.Project.ID,
		client.AllocationCreate{
			NodeID: node, CapacityShape: client.CapacityShapeGpuSlice, CPUCores: 1, MemoryMib: memoryMiB,
			AcceleratorCount: count, AcceleratorModel: model,
		}))
	require.NoError(w.T, err)
	require.Len(w.T, a.AcceleratorIds, int(count))
	w.Eventually("the allocation is active", func() error {
		a, err = client.Read[client.Allocation](w.Admin().GetAllocation(w.Ctx, w.Tenant.Project.ID, a.ID))
		return Pending(err, a.Status == client.AllocationStatusActive)
	})
	return a
}
