package command_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// withSlices makes version 4.0.0 of the demo one that needs a GPU and may share it by time slices, on a node with a GPU
// in four slices and a whole one.
func (w *world) withSlices() {
	w.T.Helper()
	doc := strings.NewReplacer(
		"accelerator: none", "accelerator: nvidia", "memory_mib:", "accelerator_sharing: [time_slices], memory_mib:",
		"version: 1.0.0", "version: 4.0.0\n  compatibility: {min_gpu_count: 1}").Replace(commandtest.Manifest())
	verified, env := w.Sign(doc)
	w.PublishVersion("4.0.0", verified, env)
	w.reportSlices()
}

func (w *world) reportSlices() {
	w.T.Helper()
	shared := &protocol.Accelerator{Id: "GPU-0", Vendor: "nvidia", Model: "H200", Health: "ok"}
	for n := range 4 {
		shared.Partitions = append(shared.Partitions, &protocol.AcceleratorPartition{
			Id: fmt.Sprintf("GPU-0-ts4-%d", n), Profile: "1/4 time slice", Sharing: protocol.SharingTimeSlices,
		})
	}
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, err := capacity.ApplyInventory(ctx, tx, w.Node, []*protocol.Accelerator{
			shared, {Id: "GPU-1", Vendor: "nvidia", Model: "H200", Health: "ok"},
		}, w.Now)
		return err
	})
}

// allocateGPU allocates one accelerator of a model.
func (w *world) allocateGPU(model string) capacity.Allocation {
	w.T.Helper()
	in := w.AllocationInput()
	in.AcceleratorCount, in.AcceleratorModel = 1, model
	a, err := w.Commands().CreateAllocation(w.T.Context(), w.Meta("gpu"+db.NewID()), in)
	require.NoError(w.T, err)
	return a
}

// onGPU deploys version 4.0.0 on an allocation, or where the hub chooses.
func (w *world) onGPU(sharing string, allocations ...string) (instance.Instance, error) {
	in := w.InstanceInput()
	in.Version, in.AllocationIDs = "4.0.0", allocations
	in.Resources = manifest.Choice{CPUMillis: 100, MemoryMiB: 64, AcceleratorSharing: sharing}
	return w.Commands().CreateInstance(w.T.Context(), w.Meta("instance"+db.NewID()), in)
}

// Who is refused only because the allocation's GPU is shared in another way learns what to set.
func TestARefusedPlacementNamesTheWayOfSharing(t *testing.T) {
	w := newWorld(t)
	w.withSlices()
	slice := w.allocateGPU("H200 1/4 time slice")
	for _, named := range [][]string{{slice.ID}, nil} {
		_, err := w.onGPU("", named...)
		require.Equal(t, capacity.CodeInsufficient, fault.As(err).Code)
		require.ErrorContains(t, err, "accelerator_sharing")
		require.Equal(t, []fault.Field{{
			Pointer: "/resources/accelerator_sharing", Reason: "the allocation has slices of shared GPUs",
			Hint: protocol.SharingTimeSlices,
		}}, fault.As(err).Fields)
	}
	i, err := w.onGPU(protocol.SharingTimeSlices)
	require.NoError(t, err)
	_, err = w.onGPU("", slice.ID)
	require.Equal(t, "/placement_intent/allocation_ids", fault.As(err).Fields[0].Pointer, "the only slice is taken")

	whole := w.allocateGPU("H200")
	_, err = w.onGPU(protocol.SharingTimeSlices, whole.ID)
	require.Equal(t, capacity.CodeInsufficient, fault.As(err).Code)
	require.Equal(t, []fault.Field{{
		Pointer: "/resources/accelerator_sharing", Reason: "the allocation has GPUs that are not shared",
		Hint: "leave it out",
	}}, fault.As(err).Fields)
	_, services := w.free(i)
	require.Equal(t, []string{"GPU-0-ts4-0"}, services[0].GetResources().GetAcceleratorIds())
}
