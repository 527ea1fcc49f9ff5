package protocol_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/protocol"
)

func TestTheIdOfASliceSaysHowItsGPUIsShared(t *testing.T) {
	require.Equal(t, "GPU-8f6d-mps4-0", protocol.SliceID("GPU-8f6d", protocol.SharingMPS, 4, 0))
	require.Equal(t, "GPU-8f6d-ts48-47", protocol.SliceID("GPU-8f6d", protocol.SharingTimeSlices, 48, 47))
	for id, want := range map[string]struct {
		sharing string
		slices  int
	}{
		"GPU-8f6d-mps4-0":   {protocol.SharingMPS, 4},
		"GPU-8f6d-ts48-47":  {protocol.SharingTimeSlices, 48},
		"GPU-8f6d-ts49-0":   {},
		"GPU-8f6d-ts1-0":    {},
		"GPU-8f6d-ts-4-0":   {},
		"GPU-8f6d-4-0":      {},
		"GPU-8f6d":          {},
		"MIG-8f6d-11ee-4-0": {},
		"ts4-0":             {},
		"":                  {},
	} {
		sharing, slices := protocol.SliceOf(id)
		require.Equal(t, want.sharing, sharing, id)
		require.Equal(t, want.slices, slices, id)
	}
}
