package backup_test

import (
	"math/rand/v2"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/powerloss"
	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/hub/internal/backup"
)

// Law 5: nodes delete the usage that a backup has, so that one that was made is whole after a power cut.
func TestLaw05ABackupThatWasMadeIsWholeAfterAPowerCut(t *testing.T) {
	skip.Root(t, "mounts and loop devices")
	const diskMiB = 64
	dir, seed := t.TempDir(), rand.Uint64()
	t.Logf("seed %d", seed)
	disk, err := powerloss.New(filepath.Join(dir, "disk"), filepath.Join(dir, "point"), diskMiB)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, disk.Close()) })
	file := filepath.Join(disk.Point, "hub.age")
	made, err := backup.Make(t.Context(), source(t), file)
	require.NoError(t, err)
	_, err = disk.Cut(rand.New(rand.NewPCG(seed, 0)), func() error { return nil })
	require.NoError(t, err)
	require.NoError(t, disk.PowerOn())
	header, err := backup.Check(file, passphrase)
	require.NoError(t, err)
	require.Equal(t, made.Header, header)
}
