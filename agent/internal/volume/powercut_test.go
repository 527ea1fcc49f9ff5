package volume_test

import (
	"math/rand/v2"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/powerloss"
	"github.com/gpuaas/gpuaas/protocol"
)

// The hub never asks again for the deletion of what a node has reported as deleted.
func TestADeletedSnapshotDoesNotReturnWithThePower(t *testing.T) {
	f := newFixture(t)
	disk, err := powerloss.New(filepath.Join(t.TempDir(), "disk"), filepath.Join(t.TempDir(), "point"), 512)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, disk.Close()) })
	f.cfg.Dir = filepath.Join(disk.Point, "volumes")
	f.v = f.open()
	p := project("v1")
	p.Snapshots = []*protocol.VolumeSnapshot{{Id: "s1"}}
	require.Equal(t, protocol.VolumeStatus_READY, f.apply(p).GetSnapshots()[0].GetStatus())
	snapshot := filepath.Join(f.cfg.Dir, "v1", "snapshots", "s1")
	require.FileExists(t, snapshot)
	require.NoError(t, disk.Sync())

	p.Snapshots[0].Deleted = true
	require.Equal(t, protocol.VolumeStatus_DELETED, f.apply(p).GetSnapshots()[0].GetStatus())
	_, err = disk.Cut(rand.New(rand.NewPCG(1, 1)), func() error { return nil })
	require.NoError(t, err)
	require.NoError(t, disk.PowerOn())
	require.DirExists(t, filepath.Dir(snapshot))
	require.NoFileExists(t, snapshot)
}
