package sim_test

import (
	"errors"
	"flag"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/sim"
)

var seed = flag.Uint64("seed", 0, "simulate this seed only")

// worlds are what a seed can become: small and wild, middling, large and calm.
func worldOf(seed uint64) sim.Config {
	switch seed % 4 {
	case 0:
		return sim.Config{Seed: seed, Nodes: 3, Days: 12, Commands: 3, Faults: 4, Quiet: 10 * time.Minute, Restores: 1}
	case 1:
		return sim.Config{Seed: seed, Nodes: 12, Days: 9, Commands: 2, Faults: 2, Quiet: 30 * time.Minute, Lease: 7 * 24 * time.Hour}
	case 2:
		return sim.Config{Seed: seed, Nodes: 6, Days: 9, Commands: 6, Faults: 8, Quiet: 10 * time.Minute, Lease: 6 * time.Hour, Restores: 2}
	default:
		return sim.Config{Seed: seed, Nodes: 40, Days: 6, Commands: 1, Faults: 1, Restores: 1}
	}
}

func TestSimulation(t *testing.T) {
	if *seed != 0 {
		result, err := sim.Run(worldOf(*seed))
		t.Logf("%+v", result)
		require.NoError(t, err)
		return
	}
	for s := uint64(1); s <= 40; s++ {
		t.Run(fmt.Sprintf("seed-%d", s), func(t *testing.T) {
			_, err := sim.Run(worldOf(s))
			require.NoError(t, err)
		})
	}
}

var _ = errors.As
