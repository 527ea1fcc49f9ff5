package harness

import (
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

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

// The parent stands for a shim that has not noted the end of its process.
func TestTheShimOfAProcessThatNoPollSawRunIsKnown(t *testing.T) {
	held, end, err := os.Pipe()
	require.NoError(t, err)
	parent := exec.CommandContext(t.Context(), "sh", "-c", "read line <&3 & exec sleep 60")
	parent.ExtraFiles = []*os.File{held}
	require.NoError(t, parent.Start())
	require.NoError(t, held.Close())
	defer func() { _ = parent.Wait() }()
	defer func() { require.NoError(t, parent.Process.Kill()) }()
	shim := parent.Process.Pid
	read := func(file string, of int) string {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", of, file))
		require.NoError(t, err)
		return string(text)
	}
	// Before, sh could reap its child.
	require.Eventually(t, func() bool { return read("comm", shim) == "sleep\n" }, time.Minute, time.Millisecond)
	var pid int
	_, err = fmt.Sscan(read(fmt.Sprintf("task/%d/children", shim), shim), &pid)
	require.NoError(t, err)
	require.NoError(t, end.Close())
	require.Eventually(t, func() bool { return strings.Contains(read("stat", pid), ") Z ") }, time.Minute,
		time.Millisecond)
	o, l := &KernelOracle{}, &ContainerProcess{pid: pid, EndedAt: time.Now()}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	o.awaitShim(ended, l)
	require.Equal(t, shim, l.shim)
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
