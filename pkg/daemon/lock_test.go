package daemon

import (
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestALockIsTakenOnceItsHolderIsGone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	holder, next := opened(t, path), opened(t, path)
	require.NoError(t, Lock(holder))
	synctest.Test(t, func(t *testing.T) {
		taken := make(chan error, 1)
		go func() { taken <- Lock(next) }()
		synctest.Wait() // it has found the lock held
		require.Empty(t, taken)
		require.NoError(t, holder.Close())
		require.NoError(t, <-taken)
	})
}

func TestALockThatIsHeldIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	holder, next := opened(t, path), opened(t, path)
	require.NoError(t, Lock(holder))
	synctest.Test(t, func(t *testing.T) {
		require.ErrorIs(t, Lock(next), unix.EWOULDBLOCK)
	})
}

func opened(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	require.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return f
}
