package durable_test

import (
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/powerloss"
	"github.com/gpuaas/gpuaas/e2e/skip"
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

// Root works for a service beside it; a service works for itself.
func TestAFileBelongsToTheOwnerOfItsDirectory(t *testing.T) {
	skip.Root(t, "the ownership of files")
	const service = 65534
	dir := t.TempDir()
	require.NoError(t, os.Chown(dir, service, service))
	for name, c := range map[string]struct {
		write func(string, []byte, fs.FileMode) error
		owner uint32
	}{
		"created":  {durable.CreateOwned, service},
		"replaced": {durable.ReplaceOwned, service},
		"own":      {durable.Create, 0},
		"own too":  {durable.Replace, 0},
	} {
		path := filepath.Join(dir, name)
		require.NoError(t, c.write(path, []byte("content"), 0o600))
		requireFile(t, path, "content", 0o600)
		info, err := os.Stat(path)
		require.NoError(t, err)
		stat, ok := info.Sys().(*syscall.Stat_t)
		require.True(t, ok)
		require.Equal(t, []uint32{c.owner, c.owner}, []uint32{stat.Uid, stat.Gid}, name)
	}
}

// The first content of a name is there whole, and so is the one that replaces it: without a sync of the file, the name
// would be durable before the content.
func TestAFileIsThereWholeAfterAPowerCut(t *testing.T) {
	skip.Root(t, "mounts and loop devices")
	const mib, cuts = 64, 4
	disk, err := powerloss.New(filepath.Join(t.TempDir(), "disk"), filepath.Join(t.TempDir(), "point"), mib)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, disk.Close()) })
	require.NoError(t, disk.Sync())
	for i := range cuts {
		seed := rand.Uint64()
		t.Logf("seed %d", seed)
		made := filepath.Join(disk.Point, "made-"+strconv.Itoa(i))
		placed := filepath.Join(disk.Point, "placed-"+strconv.Itoa(i))
		content := strings.Repeat(strconv.Itoa(i), 3*os.Getpagesize())
		require.NoError(t, durable.Create(made, []byte(content), 0o600))
		require.NoError(t, durable.Replace(placed, []byte(content), 0o600))
		replaced := filepath.Join(disk.Point, "replaced")
		require.NoError(t, durable.Replace(replaced, []byte(content), 0o600))
		_, err := disk.Cut(rand.New(rand.NewPCG(seed, 0)), func() error { return nil })
		require.NoError(t, err)
		require.NoError(t, disk.Examine(func() {
			for _, path := range []string{made, placed, replaced} {
				left, err := os.ReadFile(path)
				require.NoError(t, err)
				require.Equal(t, len(content), len(left), path) //nolint:testifylint // Len would print it
				require.True(t, content == string(left), path)  //nolint:testifylint // Equal would print it
			}
		}))
		require.NoError(t, disk.PowerOn())
	}
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
