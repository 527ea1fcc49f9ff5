package lifecycle_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/e2e/nvmltest"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/protocol"
)

// newSharedGPUPlatform is a platform whose node has three NVIDIA GPUs, the first of them shared. Version 2.0.0 of the
// app needs a GPU of its own, and version 3.0.0 may share one.
func newSharedGPUPlatform(t *testing.T, mode string) *harness.Testbed {
	t.Helper()
	w := harness.New(t)
	harness.NeedsNVML(t)
	w.StartContainerd()
	w.StartHub(w.HubConfig())
	w.NewTenant("acme")
	c := w.AgentConfig("node")
	w.NVIDIAMachine(&c)
	require.NoError(t, os.WriteFile(c.Dir+"-driver/usr/bin/nvidia-cuda-mps-control", []byte(nvmltest.MPSControl), 0o755))
	policy := filepath.Join(w.Dir, "policy.yaml")
	require.NoError(t, os.WriteFile(policy, []byte("share_weak_isolation: true\n"), 0o600))
	c.ExtraArgs = append(c.ExtraArgs, "--policy", policy, "--accelerator-sharing", harness.NVIDIAGPUs()[0]+"="+mode)
	w.Agent = w.StartAgent(c)
	w.ShipApp()
	changes := []string{
		"accelerator: none", "accelerator: nvidia", "  compatibility:\n", "  compatibility:\n    min_gpu_count: 1\n",
	}
	w.ShipVersion("2.0.0", changes...)
	w.ShipVersion("3.0.0", append(changes, "      pids_max: 64\n",
		"      pids_max: 64\n      accelerator_sharing: [mps, time_slices]\n")...)
	return w
}

// launchSlice runs an app on an allocation of a slice.
func launchSlice(w *harness.Testbed, a client.Allocation, version string,
	sharing client.AcceleratorSharing,
) (client.AppInstance, error) {
	i, _, err := w.Tenant.Launch(w.Ctx, w.Operator, client.AppInstanceCreate{
		AppSlug: harness.AppSlug, Version: version, DisplayName: "slice",
		Resources:       client.InstanceResources{AcceleratorSharing: sharing},
		PlacementIntent: client.PlacementIntent{AllocationIds: []string{a.ID}},
	}, nil)
	return i, err
}

// Two apps of one org have slices of one GPU, each its own node of the device; another org gets none.
func TestAppsOfOneOrgShareAGPUByTimeSlices(t *testing.T) {
	w := newSharedGPUPlatform(t, "time_slices:4")
	gpu, model := harness.NVIDIAGPUs()[0], harness.NVIDIAModel+" 1/4 time slice"
	require.Contains(t, w.AdminShell().MustRun("nodes", "get", w.Agent.Ready.NodeID), "1/4 time slice "+gpu+"-ts4-3")

	two := w.AllocateGPUs("", model, 2, 256)
	require.Equal(t, []string{gpu + "-ts4-0", gpu + "-ts4-1"}, two.AcceleratorIds)
	_, err := launchSlice(w, two, "3.0.0", "")
	require.ErrorContains(t, err, "insufficient_capacity", "who does not ask to share has a GPU alone")
	_, err = launchSlice(w, two, "2.0.0", client.AcceleratorSharingTimeSlices)
	require.ErrorContains(t, err, "does not allow it", "the publisher has a word")
	_, err = launchSlice(w, two, "3.0.0", client.AcceleratorSharingMps)
	require.ErrorContains(t, err, "insufficient_capacity")

	first, err := launchSlice(w, two, "3.0.0", client.AcceleratorSharingTimeSlices)
	require.NoError(t, err)
	second, err := launchSlice(w, two, "3.0.0", client.AcceleratorSharingTimeSlices)
	require.NoError(t, err)
	for _, i := range []client.AppInstance{first, second} {
		w.RequireAnswer(i)
		requireDevice(t, w.PidOf(i), "nvidia0", unix.Mkdev(195, 0))
		require.Equal(t, client.AcceleratorSharingTimeSlices, w.Instance(i.ID).Resources.AcceleratorSharing)
	}
	w.Eventually("the time of a slice is metered", func() error {
		usage, err := w.Tenant.Usage(w.Ctx, first.ID)
		return harness.Pending(err, slices.ContainsFunc(usage, func(u client.UsageRecord) bool {
			return string(u.Meter) == protocol.MeterAcceleratorSeconds
		}))
	})

	acme := w.Tenant
	w.NewTenant("globex")
	_, err = client.Read[client.Allocation](w.Admin().CreateAllocation(w.Ctx, w.Tenant.Project.ID, client.AllocationCreate{
		CapacityShape: client.CapacityShapeGpuSlice, CPUCores: 1, MemoryMib: 256, AcceleratorCount: 1,
		AcceleratorModel: model,
	}))
	require.ErrorContains(t, err, "insufficient_capacity", "two slices are left, and another org has the others")
	whole := w.AllocateGPUs("", harness.NVIDIAModel, 1, 256)
	require.NotContains(t, whole.AcceleratorIds, gpu)
	w.Tenant, w.Operator = acme, nil
	w.Operator, err = acme.ServiceAccount(w.Ctx, "operator-2", client.ServiceAccountRoleAppOperator)
	require.NoError(t, err)
	w.Decommission(first)
	w.RequireAnswer(second)
	w.Decommission(second)
}

// Two apps of one org reach one MPS daemon. When it dies, both are stopped, and start again with a new one.
func TestAppsOfOneOrgShareAGPUByMPS(t *testing.T) {
	w := newSharedGPUPlatform(t, "mps:4")
	two := w.AllocateGPUs("", harness.NVIDIAModel+" 1/4 MPS", 2, 256)
	var apps []client.AppInstance
	pids := map[string]uint32{}
	for range 2 {
		i, err := launchSlice(w, two, "3.0.0", client.AcceleratorSharingMps)
		require.NoError(t, err)
		w.RequireAnswer(i)
		apps, pids[i.ID] = append(apps, i), w.PidOf(i)
		require.FileExists(t, fmt.Sprintf("/proc/%d/root/run/nvidia-mps/control", pids[i.ID]))
		env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pids[i.ID]))
		require.NoError(t, err)
		require.Contains(t, string(env), "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25\x00")
	}
	require.NoError(t, w.Agent.Kill9())
	w.RestartAgent(w.Agent)
	for _, i := range apps {
		w.RequireAnswer(i)
		require.Equal(t, pids[i.ID], w.PidOf(i))
	}

	locks, err := filepath.Glob(filepath.Join(w.Agent.Config.RunDir, "mps", harness.NVIDIAGPUs()[0], "*", "lock"))
	require.NoError(t, err)
	require.Len(t, locks, 1)
	daemon, err := os.ReadFile(locks[0])
	require.NoError(t, err)
	pid, err := strconv.Atoi(string(daemon))
	require.NoError(t, err)
	w.Explain(harness.Faults{Why: "the MPS daemon of both apps is killed", Restarts: len(apps)})
	w.ExplainUnconfirmed(len(apps))
	require.NoError(t, unix.Kill(pid, unix.SIGKILL))
	for _, i := range apps {
		w.Eventually("it runs again", func() error {
			now := w.Instance(i.ID)
			_, gone := os.Stat(fmt.Sprintf("/proc/%d", pids[i.ID]))
			_, err := scenario.Get(w.Ctx, i.Endpoints[0].URL+"/")
			return harness.Pending(nil, gone != nil && err == nil && now.Members[0].StatusReason == "")
		})
	}
	for _, i := range apps {
		w.Decommission(i)
	}
}
