package lifecycle_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/rogpeppe/go-internal/txtar"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// The hub claims an AMD GPU of a machine whose sysfs was written by hand; hub, agent, containerd and runc are real.
func TestAnAppHasTheAcceleratorOfItsAllocation(t *testing.T) {
	w := harness.New(t)
	w.StartContainerd()
	w.StartHub(w.HubConfig())
	w.NewTenant("acme")
	machine := filepath.Join(w.Dir, "machine")
	archive, err := txtar.ParseFile(filepath.Join(harness.Source(t), "agent/internal/accelerator/testdata/radeon.txtar"))
	require.NoError(t, err)
	require.NoError(t, txtar.Write(archive, machine))
	c := w.AgentConfig("node")
	c.ExtraArgs = append(c.ExtraArgs, "--accelerator-root", machine)
	w.Agent = w.StartAgent(c)
	w.ShipApp()
	w.ShipVersion("2.0.0", "accelerator: none", "accelerator: amd", "  compatibility:\n",
		"  compatibility:\n    min_gpu_count: 1\n")

	allocation, err := client.Read[client.Allocation](w.Admin().CreateAllocation(w.Ctx, w.Tenant.Project.ID,
		client.AllocationCreate{
			NodeID: w.Agent.Ready.NodeID, CapacityShape: client.CapacityShapeGpuSlice, CPUCores: 1, MemoryMib: 512,
			AcceleratorCount: 1, AcceleratorModel: "AMD Radeon RX 7900",
		}))
	require.NoError(t, err)
	require.Equal(t, []string{"GPU-d20b5fe3917c4468"}, allocation.AcceleratorIds)
	w.Eventually("the allocation is active", func() error {
		a, err := client.Read[client.Allocation](w.Admin().GetAllocation(w.Ctx, w.Tenant.Project.ID, allocation.ID))
		return harness.Pending(err, a.Status == client.AllocationStatusActive)
	})
	i, _, err := w.Tenant.Launch(w.Ctx, w.Operator, client.AppInstanceCreate{
		AppSlug: harness.AppSlug, Version: "2.0.0", DisplayName: "gpu",
		PlacementIntent: client.PlacementIntent{AllocationIds: []string{allocation.ID}},
	}, nil)
	require.NoError(t, err)
	w.RequireAnswer(i)
	pid := w.PidOf(i)
	requireDevice(t, pid, "kfd", unix.Mkdev(235, 0))
	requireDevice(t, pid, "dri/renderD128", unix.Mkdev(226, 128))
	require.NoFileExists(t, fmt.Sprintf("/proc/%d/root/dev/dri/renderD129", pid))

	require.NoError(t, w.Agent.Kill9())
	w.RestartAgent(w.Agent)
	w.RequireAnswer(i)
	require.Equal(t, pid, w.PidOf(i))

	device := filepath.Join(machine, "sys/bus/pci/drivers/amdgpu/0000:03:00.0")
	require.NoError(t, os.Rename(device, device+".gone"))
	w.Eventually("the tenant reads that the accelerator is lost", func() error {
		return harness.Pending(nil, w.Instance(i.ID).Members[0].StatusReason == client.StatusReasonDeviceFault)
	})
	w.Eventually("its container is stopped", func() error {
		return harness.Pending(nil, w.ContainersOn(w.Agent, i) == 0)
	})
	require.NoError(t, os.Rename(device+".gone", device))
	w.Eventually("it runs again", func() error {
		now := w.Instance(i.ID)
		return harness.Pending(nil, now.Status == client.AppInstanceStatusRunning && now.Members[0].StatusReason == "" &&
			w.ContainersOn(w.Agent, i) == 1)
	})
	w.Decommission(i)
	left, err := os.ReadDir("/dev/gpuaas-" + c.ContainerdNamespace)
	require.NoError(t, err)
	require.Empty(t, left)
}

// requireDevice: the process has a device node of these numbers, open to all its users.
func requireDevice(t *testing.T, pid uint32, name string, numbers uint64) {
	t.Helper()
	var stat unix.Stat_t
	require.NoError(t, unix.Stat(fmt.Sprintf("/proc/%d/root/dev/%s", pid, name), &stat))
	require.EqualValues(t, unix.S_IFCHR|0o666, stat.Mode)
	require.Equal(t, numbers, stat.Rdev)
}
