package volume_test

import (
	"crypto/sha256"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/powerloss"
	"github.com/gpuaas/gpuaas/protocol"
)

// diskOf moves the volumes of the fixture to a disk whose power can be cut.
func diskOf(f *fixture) *powerloss.Disk {
	f.t.Helper()
	disk, err := powerloss.New(filepath.Join(f.t.TempDir(), "disk"), filepath.Join(f.t.TempDir(), "point"), 512)
	require.NoError(f.t, err)
	f.t.Cleanup(func() { require.NoError(f.t, disk.Close()) })
	f.cfg.Dir = filepath.Join(disk.Point, "volumes")
	f.v = f.open()
	return disk
}

// cut cuts the power of the disk and turns it on again.
func cut(t *testing.T, disk *powerloss.Disk) {
	t.Helper()
	_, err := disk.Cut(rand.New(rand.NewPCG(1, 1)), func() error { return nil })
	require.NoError(t, err)
	require.NoError(t, disk.PowerOn())
}

// The hub never asks again for the deletion of what a node has reported as deleted.
func TestADeletedSnapshotDoesNotReturnWithThePower(t *testing.T) {
	f := newFixture(t)
	disk := diskOf(f)
	p := project("v1")
	p.Snapshots = []*protocol.VolumeSnapshot{{Id: "s1"}}
	require.Equal(t, protocol.VolumeStatus_READY, f.apply(p).GetSnapshots()[0].GetStatus())
	snapshot := filepath.Join(f.cfg.Dir, "v1", "snapshots", "s1")
	require.FileExists(t, snapshot)
	require.NoError(t, disk.Sync())

	p.Snapshots[0].Deleted = true
	require.Equal(t, protocol.VolumeStatus_DELETED, f.apply(p).GetSnapshots()[0].GetStatus())
	cut(t, disk)
	require.DirExists(t, filepath.Dir(snapshot))
	require.NoFileExists(t, snapshot)
}

// The hub lets the tenant restore a snapshot that a node has reported.
func TestASnapshotThatWasReportedIsWholeAfterAPowerCut(t *testing.T) {
	f := newFixture(t)
	disk := diskOf(f)
	p := project("v1")
	require.Equal(t, protocol.VolumeStatus_READY, f.apply(p).GetStatus())
	require.NoError(t, disk.Sync())
	p.Snapshots = []*protocol.VolumeSnapshot{{Id: "s1"}}
	require.Equal(t, protocol.VolumeStatus_READY, f.apply(p).GetSnapshots()[0].GetStatus())
	cut(t, disk)
	content := func(names ...string) [sha256.Size]byte {
		raw, err := os.ReadFile(filepath.Join(append([]string{f.cfg.Dir, "v1"}, names...)...))
		require.NoError(t, err)
		return sha256.Sum256(raw)
	}
	require.Equal(t, content("data.img"), content("snapshots", "s1"))
}
