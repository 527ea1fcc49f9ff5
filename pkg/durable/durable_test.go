package durable_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/durable"
	"github.com/gpuaas/gpuaas/pkg/durable/durabletest"
)

func TestCreateNeverOverwrites(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key")
	require.NoError(t, durable.Create(path, []byte("first"), 0o600))
	require.ErrorIs(t, durable.Create(path, []byte("second"), 0o600), fs.ErrExist)
	requireFile(t, path, "first", 0o600)
	left, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, left, 1, "the temporary file is gone")
}

// A full disk must not leave a part of a file, whose name would be taken for ever.
func TestCreateThatFailsLeavesNoFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "key")
	free := durabletest.FillDisk(t, dir)
	err := durable.Create(path, []byte("content"), 0o600)
	free()
	require.Error(t, err)
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
	require.NoError(t, durable.Create(path, []byte("content"), 0o600))
	requireFile(t, path, "content", 0o600)
}

func TestReplaceLeavesTheNewContentAlone(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "ca.pem")
	for _, content := range []string{"first", "second"} {
		require.NoError(t, durable.Replace(path, []byte(content), 0o640))
		requireFile(t, path, content, 0o640)
	}
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, left, 1, "the temporary file is gone")
}

func TestReplaceThatFailsLeavesTheOldContent(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "taken")
	require.NoError(t, os.MkdirAll(filepath.Join(path, "below"), 0o700))
	require.Error(t, durable.Replace(path, []byte("new"), 0o600))
	require.DirExists(t, filepath.Join(path, "below"))
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, left, 1, "the temporary file is gone")
}

func requireFile(t *testing.T, path, content string, mode fs.FileMode) {
	t.Helper()
	raw, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, content, string(raw))
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, mode, info.Mode().Perm())
}
