package lifecycle_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// memoryLimit reads the limit of a process from its cgroup, of version 1 or 2.
func memoryLimit(t *testing.T, pid uint32) string {
	t.Helper()
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	require.NoError(t, err)
	for line := range strings.Lines(string(groups)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		file := filepath.Join("/sys/fs/cgroup/memory", parts[2], "memory.limit_in_bytes")
		if parts[0] == "0" {
			file = filepath.Join("/sys/fs/cgroup", parts[2], "memory.max")
		} else if parts[1] != "memory" {
			continue
		}
		if limit, err := os.ReadFile(file); err == nil {
			return strings.TrimSpace(string(limit))
		}
	}
	require.Fail(t, "the process has no limit of memory")
	return ""
}

// shmBytes is the size of a container's /dev/shm.
func shmBytes(t *testing.T, pid uint32) uint64 {
	t.Helper()
	var fs unix.Statfs_t
	require.NoError(t, unix.Statfs(fmt.Sprintf("/proc/%d/root/dev/shm", pid), &fs))
	return fs.Blocks * uint64(fs.Bsize)
}

func TestChosenResourcesReachTheContainerAndTheBill(t *testing.T) {
	w := harness.NewPlatform(t)
	_, err := client.Read[client.Price](w.Admin().CreatePrice(w.Ctx, client.PriceCreate{
		Meter: "memory_byte_seconds", Currency: "EUR", Price: "1", Per: "hour", HostSharePercent: 50,
	}))
	require.NoError(t, err)
	estimate := func(version string, mib int64) string {
		e, err := client.Read[client.CostEstimate](w.Operator.EstimateCost(w.Ctx, w.Tenant.Project.ID, harness.AppSlug,
			version, &client.EstimateCostParams{MemoryMib: mib}))
		require.NoError(t, err)
		require.Equal(t, mib<<20, e.MemoryBytes)
		return e.PerHour
	}
	first, _, err := w.Tenant.Launch(w.Ctx, w.Operator, client.AppInstanceCreate{
		AppSlug: harness.AppSlug, Version: "1.0.0", DisplayName: "sized",
		Resources: client.InstanceResources{CPUMillis: 250, MemoryMib: 96},
	}, nil)
	require.NoError(t, err)
	require.Equal(t, "100663296", memoryLimit(t, w.PidOf(first)))
	require.EqualValues(t, 96, first.Resources.MemoryMib)
	require.Equal(t, estimate("1.0.0", 96), w.Instance(first.ID).Cost.PerHour)

	w.ShipVersion("2.0.0", "pids_max: 64", "pids_max: 64\n      shm_mib: {min: 4, default: 8, max: 64}")
	upgrade := func(r client.InstanceResources) (client.AppInstance, error) {
		i, err := client.Read[client.AppInstance](w.Operator.UpgradeAppInstance(w.Ctx, w.Tenant.Project.ID, first.ID,
			client.AppInstanceUpgrade{TargetVersion: "2.0.0", Resources: r}))
		if err != nil {
			return i, err
		}
		return w.Operator.WaitInstance(w.Ctx, w.Tenant.Project.ID, i.ID, client.AppInstanceStatusRunning, nil)
	}
	_, err = upgrade(client.InstanceResources{MemoryMib: 513})
	require.ErrorContains(t, err, "insufficient_capacity")
	_, err = upgrade(client.InstanceResources{ShmMib: 65})
	require.ErrorContains(t, err, "must lie between 4 and 64")
	second, err := upgrade(client.InstanceResources{MemoryMib: 160, ShmMib: 32})
	require.NoError(t, err)
	require.Equal(t, "2.0.0", second.Version)
	require.Equal(t, first.Endpoints, second.Endpoints)
	require.EqualValues(t, 250, second.Resources.CPUMillis, "what is not named stays")
	require.Equal(t, "167772160", memoryLimit(t, w.PidOf(second)))
	require.EqualValues(t, 32<<20, shmBytes(t, w.PidOf(second)))
	require.Equal(t, estimate("2.0.0", 160), w.Instance(first.ID).Cost.PerHour)

	back, err := w.Tenant.Rollback(w.Ctx, w.Operator, first.ID, nil)
	require.NoError(t, err)
	require.EqualValues(t, 96, back.Resources.MemoryMib)
	require.Equal(t, "100663296", memoryLimit(t, w.PidOf(back)))
	usage, err := w.Tenant.Usage(w.Ctx, first.ID)
	require.NoError(t, err)
	require.NotEmpty(t, usage)
	w.Decommission(first)
}
