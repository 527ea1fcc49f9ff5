// Package durabletest stands in for a full disk in tests of what writes files.
package durabletest

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// FillDisk mounts a full disk on an empty directory, for which the test needs root. The returned function makes room.
func FillDisk(t *testing.T, dir string) (free func()) {
	t.Helper()
	require.NoError(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	all := filepath.Join(dir, "all")
	require.ErrorIs(t, os.WriteFile(all, make([]byte, 2<<20), 0o600), unix.ENOSPC)
	return func() {
		t.Helper()
		require.NoError(t, os.Remove(all))
	}
}
