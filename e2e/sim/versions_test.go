package sim_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/sim"
)

// versionsFrom and versionsTo are the seeds of worlds in which users change versions of apps, publishers and hubs are
// not always honest, and owners change their policy.
const versionsFrom, versionsTo = 2001, 2006

func versioned(seed uint64) sim.Config {
	c := sim.Config{
		Seed: versionsFrom - 1 + seed, Nodes: 4, Days: 6, Commands: 16, Faults: 6, Quiet: 10 * time.Minute, Versions: true,
	}
	if seed%2 == 0 {
		c.Restores = 2
	}
	return c
}

// versionWorlds counts, by what was compared at rest, the seeds that reached it. A seed that breaks any law is an error
// for all.
var versionWorlds = sync.OnceValues(func() (map[string]int, error) {
	reached, failed := map[string]int{}, []error{}
	for s := uint64(1); s <= versionsTo-versionsFrom+1; s++ {
		result, err := sim.Run(versioned(s))
		if err != nil {
			failed = append(failed, fmt.Errorf("seed %d: %w", versionsFrom-1+s, err))
			continue
		}
		for what := range result.Compared {
			reached[what]++
		}
	}
	return reached, errors.Join(failed...)
})

// requireCompared fails on any error of any seed, and unless so many seeds reached each comparison.
func requireCompared(t *testing.T, want int, compared ...string) {
	t.Helper()
	reached, err := versionWorlds()
	require.NoError(t, err)
	t.Logf("seeds that reached each comparison: %v", reached)
	for _, what := range compared {
		require.GreaterOrEqual(t, reached[what], want, what)
	}
}

// A manifest of a stranger, an image beside the manifest and a feature of a later release never run.
func TestLaw01WhatNoPublisherSignedNeverRunsThroughFaults(t *testing.T) {
	requireCompared(t, 3, "stranger", "deviating", "later")
}

// A node that has left a revision, and a user that has rolled one back, end at exactly the content of before. The
// checks of laws 5 and 17 on the bill ran for the same members.
func TestLaw13ChangesOfVersionEndAtOneVersion(t *testing.T) {
	requireCompared(t, 2, "rolled back", "fell back")
}

func TestLaw15TheOwnersRefusalWinsThroughFaults(t *testing.T) {
	requireCompared(t, 4, "refused by the owner")
}

// TestCheckerCatchesBrokenVersions leaves one rule out at a time.
func TestCheckerCatchesBrokenVersions(t *testing.T) {
	for rule, law := range map[sim.Breakage]int{
		sim.BreakManifest: 1, sim.BreakOwner: 15, sim.BreakRollback: 13,
	} {
		t.Run(string(rule), func(t *testing.T) {
			for s := uint64(1); s <= 10; s++ {
				world := versioned(s)
				world.Break = rule
				_, err := sim.Run(world)
				if err == nil {
					continue
				}
				found := &sim.Violation{}
				require.ErrorAs(t, err, &found)
				t.Logf("seed %d: law %d: %s", s, found.Law, found.What)
				require.Equal(t, law, found.Law)
				return
			}
			t.Fatalf("no seed breaks a law without the rule %s", rule)
		})
	}
}
