package lifecycle_test

import (
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/protocol"
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
	for _, meter := range []string{protocol.MeterMemoryByteSeconds, protocol.MeterCPUSeconds} {
		_, err := client.Read[client.Price](w.Admin().CreatePrice(w.Ctx, client.PriceCreate{
			Meter: meter, Currency: scenario.Currency, Price: "2", Per: "hour", HostSharePercent: 50,
		}))
		require.NoError(t, err)
	}
	estimate := func(version string, mib int64) client.CostEstimate {
		e, err := client.Read[client.CostEstimate](w.Operator.EstimateCost(w.Ctx, w.Tenant.Project.ID, harness.AppSlug,
			version, &client.EstimateCostParams{CPUMillis: 250, MemoryMib: mib}))
		require.NoError(t, err)
		require.Equal(t, mib<<20, e.MemoryBytes)
		require.Len(t, e.Rates, 3)
		return e
	}
	first, _, err := w.Tenant.Launch(w.Ctx, w.Operator, client.AppInstanceCreate{
		AppSlug: harness.AppSlug, Version: "1.0.0", DisplayName: "sized",
		Resources: client.InstanceResources{CPUMillis: 250, MemoryMib: 96},
	}, nil)
	require.NoError(t, err)
	require.Equal(t, "100663296", memoryLimit(t, w.PidOf(first)))
	require.EqualValues(t, 96, first.Resources.MemoryMib)
	small := estimate("1.0.0", 96)
	require.Equal(t, small.PerHour, w.Instance(first.ID).Cost.PerHour)

	w.ShipVersion("2.0.0", "pids_max: 64", "pids_max: 64\n      shm_mib: {min: 4, default: 8, max: 64}")
	upgrade := func(r client.InstanceResources) (client.AppInstance, error) {
		i, err := client.Read[client.AppInstance](w.Operator.UpgradeAppInstance(w.Ctx, w.Tenant.Project.ID, first.ID,
			client.AppInstanceUpgrade{TargetVersion: "2.0.0", Resources: r}))
		if err != nil {
			return i, err
		}
		return w.Tenant.AwaitStatus(w.Ctx, w.Operator, i.ID, client.AppInstanceStatusRunning, nil)
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
	large := estimate("2.0.0", 160)
	require.Equal(t, large.PerHour, w.Instance(first.ID).Cost.PerHour)

	back, err := w.Tenant.Rollback(w.Ctx, w.Operator, first.ID, nil)
	require.NoError(t, err)
	require.EqualValues(t, 96, back.Resources.MemoryMib)
	require.Equal(t, "100663296", memoryLimit(t, w.PidOf(back)))
	w.Decommission(first)
	requireBilledAsEstimated(w, first, small, large)
}

// perUnit derives from an estimate what a unit of each meter costs: a second, a core-second, a byte-second.
func perUnit(t *testing.T, e client.CostEstimate) map[string]*big.Rat {
	t.Helper()
	units := map[string]*big.Rat{
		protocol.MeterSessionSeconds:    big.NewRat(3600, 1),
		protocol.MeterCPUSeconds:        big.NewRat(3600*e.CPUMillis, 1000),
		protocol.MeterMemoryByteSeconds: new(big.Rat).SetInt64(3600 * e.MemoryBytes),
	}
	for _, r := range e.Rates {
		perHour, ok := new(big.Rat).SetString(r.PerHour)
		require.True(t, ok)
		units[r.Meter] = perHour.Quo(perHour, units[r.Meter])
	}
	return units
}

// requireBilledAsEstimated compares the final bill of an instance with its estimates: the same price for each unit of
// what was measured, and never more than the larger one allows for the time that it ran.
func requireBilledAsEstimated(w *harness.Testbed, i client.AppInstance, small, large client.CostEstimate) {
	w.T.Helper()
	postings := w.FinalPostings(i)
	usage, err := w.Tenant.Usage(w.Ctx, i.ID)
	require.NoError(w.T, err)
	units := perUnit(w.T, small)
	for meter, price := range perUnit(w.T, large) {
		require.Zero(w.T, price.Cmp(units[meter]), "the price of %s does not depend on the size", meter)
	}
	due, measured := new(big.Rat), map[string]*big.Rat{}
	for _, u := range usage {
		quantity, ok := new(big.Rat).SetString(u.Quantity)
		require.True(w.T, ok)
		if units[u.Meter] == nil {
			continue
		}
		if measured[u.Meter] == nil {
			measured[u.Meter] = new(big.Rat)
		}
		measured[u.Meter].Add(measured[u.Meter], quantity)
		due.Add(due, new(big.Rat).Mul(quantity, units[u.Meter]))
	}
	require.Len(w.T, measured, len(units), "each priced meter was measured")
	paid := harness.UsageCost(w.T, postings)
	off := new(big.Rat).Sub(paid, due)
	roundings := big.NewRat(int64(len(usage)), 1_000_000_000)
	require.LessOrEqual(w.T, off.Abs(off).Cmp(roundings), 0, "paid %s for %s", paid.FloatString(9), due.FloatString(9))
	most, ok := new(big.Rat).SetString(large.PerHour)
	require.True(w.T, ok)
	most.Mul(most, measured[protocol.MeterSessionSeconds]).Quo(most, big.NewRat(3600, 1))
	require.LessOrEqual(w.T, paid.Cmp(most.Add(most, roundings)), 0, "paid %s, at most %s was estimated",
		paid.FloatString(9), most.FloatString(9))
}
