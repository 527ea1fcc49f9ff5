package harness

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// RequireNowhereStored searches the hub's tables, and every file of the testbed that is not in memory, for a secret.
func (w *Testbed) RequireNowhereStored(secret string) {
	w.T.Helper()
	require.Empty(w.T, w.TablesWith(secret))
	read := 0
	require.NoError(w.T, filepath.WalkDir(w.Dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() || InMemory(path) {
			return nil //nolint:nilerr // files come and go
		}
		data, err := os.ReadFile(path)
		require.False(w.T, err == nil && bytes.Contains(data, []byte(secret)), path)
		read++
		return nil
	}))
	require.Greater(w.T, read, 50)
}

// InMemory reports whether a file is in a tmpfs.
func InMemory(path string) bool {
	var s unix.Statfs_t
	return unix.Statfs(path, &s) == nil && s.Type == unix.TMPFS_MAGIC
}
