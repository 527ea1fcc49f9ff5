package sim_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/sim"
)

// TestNothingIsSuspendedWithoutFaults: what the hub suspends, faults explain. Each suspension of a world with faults
// was checked when it was posted; without faults there is none to explain.
func TestNothingIsSuspendedWithoutFaults(t *testing.T) {
	world := worldOf(4)
	faulty, err := sim.Run(world)
	require.NoError(t, err)
	require.Positive(t, faulty.Suspensions)
	require.Positive(t, faulty.SuspendedSeconds)

	world.Faults, world.Restores = 0, 0
	quiet, err := sim.Run(world)
	require.NoError(t, err)
	require.Positive(t, quiet.BilledSeconds)
	require.Less(t, quiet.SuspendedSeconds, int64(60), "containers stop some seconds after their lease")
}
