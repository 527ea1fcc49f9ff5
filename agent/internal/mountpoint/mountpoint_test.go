package mountpoint_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/internal/mountpoint"
	"github.com/gpuaas/gpuaas/e2e/skip"
)

func TestMountsAreSeenAndEnded(t *testing.T) {
	skip.Root(t, "mounts")
	dir := filepath.Join(t.TempDir(), "at")
	is := func() bool {
		mounted, err := mountpoint.Is(dir)
		require.NoError(t, err)
		return mounted
	}
	require.False(t, is(), "it is not there")
	require.NoError(t, mountpoint.Remove(dir))
	require.NoError(t, os.Mkdir(dir, 0o700))
	require.False(t, is())
	for range 2 {
		require.NoError(t, unix.Mount("test", dir, "tmpfs", 0, ""))
	}
	require.True(t, is())
	require.NoError(t, mountpoint.Unmount(dir))
	require.False(t, is(), "all of them are gone")
	require.NoError(t, unix.Mount("test", dir, "tmpfs", 0, ""))
	require.NoError(t, mountpoint.Remove(dir))
	require.NoDirExists(t, dir)
	require.NoError(t, os.Mkdir(dir, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o600))
	require.Error(t, mountpoint.Remove(dir), "it is not empty")
}
