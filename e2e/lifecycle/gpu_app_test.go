package lifecycle_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/protocol"
)

// The hub claims an AMD GPU of a machine whose sysfs was written by hand; hub, agent, containerd and runc are real.
func TestAnAppHasTheAcceleratorOfItsAllocation(t *testing.T) {
	w, machine := harness.NewGPUPlatform(t, "radeon.txtar")
	allocation := w.AllocateGPUs(w.Agent.Ready.NodeID, "AMD Radeon RX 7900", 1, 512)
	require.Equal(t, []string{"GPU-d20b5fe3917c4468"}, allocation.AcceleratorIds)
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

	w.Eventually("the time of its accelerator is metered", func() error {
		usage, err := w.Tenant.Usage(w.Ctx, i.ID)
		return harness.Pending(err, slices.ContainsFunc(usage, func(u client.UsageRecord) bool {
			return string(u.Meter) == protocol.MeterAcceleratorSeconds
		}))
	})

	require.NoError(t, w.Agent.Kill9())
	w.RestartAgent(w.Agent)
	w.RequireAnswer(i)
	require.Equal(t, pid, w.PidOf(i))

	device := filepath.Join(machine, "sys/bus/pci/drivers/amdgpu/0000:03:00.0")
	w.Explain(harness.Faults{Why: "an accelerator is lost", Restarts: 1})
	w.ExplainUnconfirmed(1)
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
	left, err := os.ReadDir("/dev/gpuaas-" + w.Agent.Config.ContainerdNamespace)
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
