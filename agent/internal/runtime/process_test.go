package runtime

import (
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestOnlyTheVeryProcessThatWasSeenRunningCountsAsRunning(t *testing.T) {
	r := &Runtime{}
	child := exec.CommandContext(t.Context(), "sleep", "1000")
	require.NoError(t, child.Start())
	pid := uint32(child.Process.Pid)
	require.Nil(t, r.stillRunning("a"), "nothing is known of it")
	r.noteRunning("a", pid)
	require.Equal(t, pid, r.stillRunning("a").GetPid())
	p, there := readProcess(pid)
	require.True(t, there)
	require.WithinDuration(t, time.Now(), p.startedAt(), time.Minute)

	r.running.Store("b", process{pid: pid, start: p.start - 1})
	require.Nil(t, r.stillRunning("b"), "the number was given again")

	require.NoError(t, child.Process.Signal(os.Kill))
	require.Eventually(t, func() bool { return r.stillRunning("a") == nil }, time.Minute, time.Millisecond,
		"a zombie has ended")
	require.Error(t, child.Wait())
	r.noteRunning("c", pid)
	require.Nil(t, r.stillRunning("c"))
	r.running.Range(func(id, _ any) bool {
		require.Fail(t, "a process that has ended is remembered", id)
		return false
	})
}
