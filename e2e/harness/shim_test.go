package harness

import (
	"os"
	"os/exec"
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
	before, err := waitedForProcessor(os.Getpid())
	require.NoError(t, err)
	require.Positive(t, before, "some thread of this program has waited before it first ran")
	_, err = waitedForProcessor(0)
	require.Error(t, err)
}
