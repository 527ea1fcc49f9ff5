package sim_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/sim"
)

// TestSmallWorldsHold runs a few small worlds with many faults. The patches of e2e/mutants that break a line of the
// product for each law name it: it takes some seconds and shrinks nothing.
func TestSmallWorldsHold(t *testing.T) {
	for _, world := range []sim.Config{
		busy(1),
		forgetful(1),
		{Seed: 2, Nodes: 3, Days: 6, Commands: 6, Faults: 8, Quiet: 10 * time.Minute, Lease: 6 * time.Hour, Restores: 3},
		handedOver(1),
		late(3),
	} {
		_, err := sim.Run(world)
		require.NoError(t, err)
	}
}
