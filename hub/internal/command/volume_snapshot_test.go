package command_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/protocol"
)

// restored makes the hub one that was restored from a backup a moment ago.
func (w *world) restored() {
	w.T.Helper()
	w.Exec(`INSERT INTO restores (id, backup_id, taken_at, epoch, restored_at) VALUES ($1, $2, $3, 2, $3)`, db.NewID(),
		db.NewID(), w.Now.Add(time.Second))
}

// Law 16: a snapshot that was taken after the backup is listed again once the node has reported it, and can be
// restored.
func TestLaw16ASnapshotThatTheRowsHaveLostIsListedAgain(t *testing.T) {
	w := newVolumeWorld(t)
	v := w.volume("data")
	w.restored()
	lost := db.NewID()
	kept := func(id string) *protocol.VolumeStatus {
		return &protocol.VolumeStatus{
			Id: v.ID, Status: protocol.VolumeStatus_READY, Snapshots: []*protocol.SnapshotStatus{
				{Id: id, Status: protocol.VolumeStatus_READY, SizeBytes: 1 << 62},
				{Id: id, Status: protocol.VolumeStatus_READY},
				{Id: db.NewID(), Status: protocol.VolumeStatus_PENDING},
				{Id: "../" + id, Status: protocol.VolumeStatus_READY},
			},
		}
	}
	for range 2 {
		w.reportVolume(kept(lost))
	}
	var listed []capacity.Snapshot
	w.Tx(func(ctx context.Context, tx db.Tx) (err error) {
		listed, err = capacity.ListSnapshots(ctx, tx, v.ID)
		return err
	})
	require.Len(t, listed, 1)
	require.Equal(t, lost, listed[0].ID)
	require.EqualValues(t, 64<<20, listed[0].SizeBytes, "no more than the volume")
	require.Equal(t, 128<<20, w.Count(`SELECT volume_bytes FROM subjects WHERE id = $1`, v.ID))
	require.Equal(t, 1, w.Count(`SELECT count(*) FROM recovery_findings
		WHERE kind = 'volume_snapshot_unknown' AND resource_id = $1`, lost))
	_, err := w.Commands().RestoreVolume(t.Context(), w.Meta("restore"), w.Project.ID, v.ID, lost)
	require.NoError(t, err)
	w.Exec(`UPDATE volume_snapshots SET status = 'deleted', deleted_at = now()`)
	w.reportVolume(kept(lost))
	require.Equal(t, 1, w.Count(`SELECT count(*) FROM volume_snapshots`), "a deleted one does not come back")
}

// Law 10: the rows of a hub that was not restored since the volume was made have lost no snapshot of it: what a node
// reports beside them it has invented, and no tenant pays for that.
func TestLaw10NobodyPaysForSnapshotsThatANodeInvents(t *testing.T) {
	w := newVolumeWorld(t)
	w.Exec(`INSERT INTO restores (id, backup_id, taken_at, epoch, restored_at) VALUES ($1, $1, $2, 2, $2)`, db.NewID(),
		w.Now.Add(-time.Hour))
	v := w.volume("data")
	w.reportVolume(&protocol.VolumeStatus{
		Id: v.ID, Status: protocol.VolumeStatus_READY, Snapshots: []*protocol.SnapshotStatus{
			{Id: db.NewID(), Status: protocol.VolumeStatus_READY, SizeBytes: 64 << 20},
		},
	})
	require.Zero(t, w.Count(`SELECT count(*) FROM volume_snapshots`))
	require.Equal(t, 64<<20, w.Count(`SELECT volume_bytes FROM subjects WHERE id = $1`, v.ID))
}

// Law 10: a node that invents snapshots makes its tenant pay for no more than a volume may have.
func TestLaw10SnapshotsThatANodeInventsAreBounded(t *testing.T) {
	w := newVolumeWorld(t)
	v := w.volume("data")
	w.restored()
	for range 2 {
		invented := &protocol.VolumeStatus{Id: v.ID, Status: protocol.VolumeStatus_READY}
		for range protocol.MaxSnapshots - 1 {
			invented.Snapshots = append(invented.Snapshots, &protocol.SnapshotStatus{
				Id: db.NewID(), Status: protocol.VolumeStatus_READY, SizeBytes: 64 << 20,
			})
		}
		w.reportVolume(invented)
	}
	require.Equal(t, protocol.MaxSnapshots, w.Count(`SELECT count(*) FROM volume_snapshots`))
	require.Equal(t, (protocol.MaxSnapshots+1)*64<<20, w.Count(`SELECT volume_bytes FROM subjects WHERE id = $1`, v.ID))
}

// A failed instance cannot be stopped, and what has broken its volume is what a restore mends.
func TestAVolumeOfAFailedInstanceIsRestoredOnceItsContainersHaveEnded(t *testing.T) {
	w := newVolumeWorld(t)
	v := w.volume("data")
	snapshot, err := w.Commands().CreateVolumeSnapshot(t.Context(), w.Meta("snapshot"), w.Project.ID, v.ID, "first")
	require.NoError(t, err)
	w.reportVolume(&protocol.VolumeStatus{
		Id: v.ID, Status: protocol.VolumeStatus_READY,
		Snapshots: []*protocol.SnapshotStatus{{Id: snapshot.ID, Status: protocol.VolumeStatus_READY}},
	})
	i, err := w.launch("2.0.0", v.ID)
	require.NoError(t, err)
	restore := func() error {
		return second(w.Commands().RestoreVolume(t.Context(), w.Meta("restore"), w.Project.ID, v.ID, snapshot.ID))
	}
	crashes := w.Says(i, protocol.WorkloadStatus_FAILED)
	crashes.Reason = protocol.WorkloadStatus_CRASH_LOOP
	w.Report(1, crashes)
	w.Now = w.Now.Add(time.Minute)
	w.Report(2, crashes)
	require.Equal(t, lifecycle.Failed, w.Get(i.ID).Lifecycle.Status)
	requireCode(t, "volume_in_use", restore())
	_, err = w.Commands().StopInstance(t.Context(), w.Meta("stop"), w.Project.ID, i.ID)
	requireCode(t, "instance_failed", err)
	crashes.Status = protocol.WorkloadStatus_STOPPED
	w.Report(3, crashes)
	require.NoError(t, restore())
}
