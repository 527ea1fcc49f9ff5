package starter_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/deploy/starter"
)

// A daemon that a step starts has the step's output, and outlives it.
func TestAStepMayStartADaemonThatHoldsItsOutput(t *testing.T) {
	dir := t.TempDir()
	end := filepath.Join(dir, "end")
	require.NoError(t, unix.Mkfifo(end, 0o600))
	n := starter.Node{
		Machine: starter.Machine{Shell: []string{"env"}}, Name: "n1", Dir: dir,
		Script: []byte("read -r line <\"$3/end\" &\necho \"$1 $2\"\n"),
	}
	said, err := n.Step(t.Context(), "start")
	daemon, openErr := os.OpenFile(end, os.O_WRONLY, 0) // waits for the daemon, which ends with it
	require.NoError(t, openErr)
	require.NoError(t, daemon.Close())
	require.NoError(t, err)
	require.Equal(t, "start n1", said)
}
