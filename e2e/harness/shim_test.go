package harness

import (
	"maps"
	"os"
	"os/exec"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTheParentOfAProcessIsKnown(t *testing.T) {
	sleeper := exec.CommandContext(t.Context(), "sleep", "60")
	require.NoError(t, sleeper.Start())
	defer func() { _ = sleeper.Wait() }()
	defer func() { require.NoError(t, sleeper.Process.Kill()) }()
	require.Equal(t, os.Getpid(), parentOf(sleeper.Process.Pid))
}

func TestTheKernelTellsHowLongAProcessWaited(t *testing.T) {
	before, err := waitsForProcessor(os.Getpid())
	require.NoError(t, err)
	after, err := waitsForProcessor(os.Getpid())
	require.NoError(t, err)
	for thread, wait := range after {
		require.GreaterOrEqual(t, wait, before[thread])
	}
	require.Positive(t, slices.Max(slices.Collect(maps.Values(after))), "some thread has waited before it first ran")
	_, err = waitsForProcessor(0)
	require.Error(t, err)
}
