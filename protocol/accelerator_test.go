package protocol_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/protocol"
)

func TestTheIdOfASliceSaysHowItsGPUIsShared(t *testing.T) {
	require.Equal(t, "GPU-8f6d-mps4-0", protocol.SliceID("GPU-8f6d", protocol.SharingMPS, 4, 0))
	require.Equal(t, "GPU-8f6d-ts48-47", protocol.SliceID("GPU-8f6d", protocol.SharingTimeSlices, 48, 47))
	for id, want := range map[string]struct {
		gpu, sharing string
		slices       int
	}{
		"GPU-8f6d-mps4-0":   {"GPU-8f6d", protocol.SharingMPS, 4},
		"GPU-8f6d-ts48-47":  {"GPU-8f6d", protocol.SharingTimeSlices, 48},
		"GPU-8f6d-ts49-0":   {},
		"GPU-8f6d-ts1-0":    {},
		"GPU-8f6d-ts-4-0":   {},
		"GPU-8f6d-4-0":      {},
		"GPU-8f6d":          {},
		"MIG-8f6d-11ee-4-0": {},
		"ts4-0":             {},
		"":                  {},
	} {
		gpu, sharing, slices := protocol.SliceOf(id)
		require.Equal(t, want.gpu, gpu, id)
		require.Equal(t, want.sharing, sharing, id)
		require.Equal(t, want.slices, slices, id)
	}
}

// manySlices are the accelerators of the largest machine.
func manySlices() (found []*protocol.Accelerator) {
	id := func(n int) string { return fmt.Sprintf("GPU-%08x-4c1b-11ef-9a6f-0242ac120002", n) }
	for n := range 16 {
		a := &protocol.Accelerator{
			Id: id(n), Vendor: protocol.VendorNVIDIA, Model: "NVIDIA H200 141GB HBM3e", MemoryBytes: 141 << 30, Health: "ok",
			PciAddress: "0000:0c:00.0", NumaNode: proto.Uint32(1), Cores: 16896, DriverVersion: "570.124.06",
			RuntimeVersion: "12.8",
		}
		for peer := range 16 {
			a.Links = append(a.Links, &protocol.AcceleratorLink{PeerId: id(peer), Kind: "nvlink", Count: 18})
		}
		for slice := range protocol.MaxSlices {
			a.Partitions = append(a.Partitions, &protocol.AcceleratorPartition{
				Id:      protocol.SliceID(a.GetId(), protocol.SharingTimeSlices, protocol.MaxSlices, slice),
				Profile: "1/48 time_slices", MemoryBytes: 141 << 30, Sharing: protocol.SharingTimeSlices,
			})
		}
		found = append(found, a)
	}
	return found
}

// A node that a hub cannot read the hello of has no session for ever.
func TestTheHelloOfAMachineWithManySlicesIsNotTooLarge(t *testing.T) {
	message := &protocol.NodeMessage{Message: &protocol.NodeMessage_Hello{Hello: &protocol.Hello{
		Facts: &protocol.NodeFacts{Accelerators: manySlices()},
	}}}
	require.Less(t, proto.Size(message), protocol.MaxHelloBytes/2)
}
