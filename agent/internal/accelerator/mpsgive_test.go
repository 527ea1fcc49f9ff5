package accelerator

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/protocol"
)

// withDaemon is as an agent finds the MPS daemon of a GPU that an earlier one has started.
func withDaemon(t *testing.T) (m *mps, at string, gpu grant) {
	t.Helper()
	m = &mps{dir: t.TempDir()}
	at = filepath.Join(m.dir, "GPU-a", "acme")
	require.NoError(t, os.MkdirAll(at, 0o700))
	daemon, err := os.Create(filepath.Join(at, "lock"))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, daemon.Close()) })
	require.NoError(t, unix.Flock(int(daemon.Fd()), unix.LOCK_EX))
	return m, at, grant{accelerator: &protocol.Accelerator{Id: "GPU-a"}, sharing: protocol.SharingMPS}
}

// A kill of the agent while a daemon starts leaves one that does not limit its clients yet.
func TestNoContainerReachesAnMPSDaemonThatIsNotReady(t *testing.T) {
	m, at, gpu := withDaemon(t)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := m.give(ended, gpu, "acme", false)
	require.ErrorIs(t, err, context.Canceled)
	require.NoError(t, os.WriteFile(filepath.Join(at, "ready"), nil, 0o600))
	_, err = m.give(t.Context(), gpu, "acme", false)
	require.NoError(t, err)
}

// The container that was just given it is not listed yet.
func TestAnMPSDaemonThatIsGivenAgainIsNotIdle(t *testing.T) {
	m, at, gpu := withDaemon(t)
	require.NoError(t, os.WriteFile(filepath.Join(at, "ready"), nil, 0o600))
	_, err := m.give(t.Context(), gpu, "acme", false)
	require.NoError(t, err)
	require.NoError(t, m.stopIdle(nil, time.Now(), time.Hour))
	require.DirExists(t, at)
	require.NoError(t, m.stopIdle(nil, time.Now().Add(2*time.Hour), time.Hour))
	require.NoDirExists(t, at)
}
