package sim_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/sim"
)

// shrinkRuns bounds the worlds that are run to shrink one that breaks a law.
const shrinkRuns = 300

// requireHolds runs a world. One that breaks a law it shrinks and prints, so that it can be kept in testdata.
func requireHolds(t *testing.T, world sim.Config) {
	t.Helper()
	_, err := sim.Run(world)
	found := &sim.Violation{}
	if errors.As(err, &found) {
		small, last := sim.Shrink(world, found, shrinkRuns)
		script, jsonErr := json.MarshalIndent(small, "", "  ")
		require.NoError(t, jsonErr)
		t.Errorf("shrunk to %d steps, which break law %d: %s\nto keep it, write into e2e/sim/testdata/<name>.json:\n%s",
			len(small.Keep), last.Law, last.What, script)
	}
	require.NoError(t, err)
}

// TestKeptWorldsHold runs the worlds of testdata, which TestSimulation once found and shrank. One that leaves out a
// rule breaks a law, and holds with the rule. Where it breaks none any more, because the draws of the world have
// changed: take another seed with -seed and -break.
func TestKeptWorldsHold(t *testing.T) {
	paths, err := filepath.Glob("testdata/*.json")
	require.NoError(t, err)
	require.NotEmpty(t, paths)
	for _, path := range paths {
		t.Run(filepath.Base(path), func(t *testing.T) {
			raw, err := os.ReadFile(path)
			require.NoError(t, err)
			var world sim.Config
			require.NoError(t, json.Unmarshal(raw, &world))
			broken := world
			world.Break = ""
			_, err = sim.Run(world)
			require.NoError(t, err)
			if broken.Break != "" {
				_, err = sim.Run(broken)
				require.Error(t, err, "it does not show any more what leaving out %q breaks", broken.Break)
			}
		})
	}
}

func TestMinimizeKeepsWhatIsNeeded(t *testing.T) {
	var all []string
	for i := range 100 {
		all = append(all, strconv.Itoa(i))
	}
	calls := 0
	needs := func(what ...string) func([]string) bool {
		return func(kept []string) bool {
			calls++
			return !slices.ContainsFunc(what, func(s string) bool { return !slices.Contains(kept, s) })
		}
	}
	for _, what := range [][]string{{"3", "17", "99"}, {"0"}, {"50", "51"}, all[:7]} {
		require.Equal(t, what, sim.Minimize(all, 1000, needs(what...)))
	}
	require.Empty(t, sim.Minimize(all, 1000, needs()))
	require.Equal(t, []string{"4"}, sim.Minimize([]string{"4"}, 1000, needs("4")))
	calls = 0
	require.Subset(t, sim.Minimize(all, 5, needs("3", "17")), []string{"3", "17"})
	require.Equal(t, 5, calls)
}

// TestAWorldShrinksToTheStepsThatBreakIt: a node that keeps its incarnation after its disk was put back needs a member,
// the disk and little else.
func TestAWorldShrinksToTheStepsThatBreakIt(t *testing.T) {
	world := sim.Config{
		Seed: 1, Nodes: 1, Days: 2, Commands: 24, Faults: 30, Kinds: []string{"disk put back", "network cut"},
		Break: sim.BreakIncarnation,
	}
	whole, err := sim.Run(world)
	found := &sim.Violation{}
	require.ErrorAs(t, err, &found)
	small, last := sim.Shrink(world, found, shrinkRuns)
	require.Equal(t, found.Law, last.Law)
	require.Less(t, len(small.Keep), 10)
	t.Logf("%d of %d steps, law %d: %s", len(small.Keep), len(whole.Steps), last.Law, last.What)
	require.Greater(t, len(whole.Steps), 3*len(small.Keep))

	_, err = sim.Run(small)
	again := &sim.Violation{}
	require.ErrorAs(t, err, &again)
	require.Equal(t, last, again, "the script says everything")
	small.Break = ""
	_, err = sim.Run(small)
	require.NoError(t, err)
}
