package lifecycle_test

import (
	"fmt"
	"os"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// One of the node's two MI300X is in eight partitions. Apps get partitions by the name of their model, each its own
// device node, and the other GPU as a whole.
func TestAppsHavePartitionsOfAGPU(t *testing.T) {
	w, _ := harness.NewGPUPlatform(t, "mi300x.txtar")

	node := harness.AsJSON[client.Node](w.AdminShell(), "nodes", "get", w.Agent.Ready.NodeID)
	at := slices.IndexFunc(node.Accelerators, func(a client.NodeAccelerator) bool { return len(a.Partitions) > 0 })
	require.GreaterOrEqual(t, at, 0)
	gpu := node.Accelerators[at]
	rendered := map[string]bool{}
	launch := func(name, model string) (client.Allocation, client.AppInstance) {
		a := w.AllocateGPUs("", model, 1, 256)
		i, _, err := w.Tenant.Launch(w.Ctx, w.Operator, client.AppInstanceCreate{
			AppSlug: harness.AppSlug, Version: "2.0.0", DisplayName: name,
			PlacementIntent: client.PlacementIntent{AllocationIds: []string{a.ID}},
		}, nil)
		require.NoError(t, err)
		w.RequireAnswer(i)
		nodes, err := os.ReadDir(fmt.Sprintf("/proc/%d/root/dev/dri", w.PidOf(i)))
		require.NoError(t, err)
		require.Len(t, nodes, 1, name)
		require.False(t, rendered[nodes[0].Name()], "%s is in two containers", nodes[0].Name())
		rendered[nodes[0].Name()] = true
		return a, i
	}
	part := gpu.Model + " " + gpu.Partitions[0].Profile
	first, one := launch("first", part)
	second, two := launch("second", part)
	require.NotEqual(t, first.AcceleratorIds, second.AcceleratorIds)
	w.Decommission(one)
	w.Decommission(two)
	for _, a := range []client.Allocation{first, second} {
		_, err := client.Read[client.Allocation](w.Admin().ReleaseAllocation(w.Ctx, w.Tenant.Project.ID, a.ID))
		require.NoError(t, err)
	}
	whole, three := launch("whole", "")
	require.Equal(t, node.Accelerators[1-at].ID, whole.AcceleratorIds[0])
	w.Decommission(three)
	_, err := client.Read[client.Allocation](w.Admin().CreateAllocation(w.Ctx, w.Tenant.Project.ID,
		client.AllocationCreate{
			CapacityShape: client.CapacityShapeGpuSlice, CPUCores: 1, MemoryMib: 256, AcceleratorCount: 1,
			AcceleratorModel: gpu.Model,
		}))
	require.ErrorContains(t, err, "insufficient_capacity", "the other one can be had by its partitions alone")
}
