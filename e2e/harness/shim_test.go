package harness

import (
	"io"
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

func TestSendersOfSignalsAreChildrenThatKill(t *testing.T) {
	require.Empty(t, signalSenders(os.Getpid()))
	sender := exec.CommandContext(t.Context(), "sh", "-c", "echo; read line", "kill")
	stdin, err := sender.StdinPipe()
	require.NoError(t, err)
	stdout, err := sender.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, sender.Start())
	_, err = io.ReadFull(stdout, make([]byte, 1)) // its arguments are there
	require.NoError(t, err)
	require.Equal(t, []int{sender.Process.Pid}, signalSenders(os.Getpid()))
	require.NoError(t, stdin.Close())
	require.Error(t, sender.Wait(), "it has read no line")
	require.Empty(t, signalSenders(os.Getpid()))
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
