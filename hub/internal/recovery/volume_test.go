package recovery_test

import (
	"cmp"
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/protocol"
)

func reportVolume(l *hubtest.Session, under *protocol.DesiredState, s *protocol.VolumeStatus) {
	l.T.Helper()
	s.Status = cmp.Or(s.GetStatus(), protocol.VolumeStatus_READY)
	l.ReportVolume(under, s)
}

// Law 16: a node that has done a restore under a number does no other under it, and would report the tenant's next
// restore as done.
func TestLaw16AVolumeThatWasRestoredAndEnlargedAfterTheBackupStaysSo(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	commands := &command.Service{DB: h.DB}
	_, err := commands.CreateAllocation(t.Context(), h.Tenant("allocation"), capacity.NewAllocation{
		ProjectID: h.Project.ID, Shape: capacity.GPUSlice, CPUCores: 1, MemoryMiB: 1024,
	})
	require.NoError(t, err)
	v, err := commands.CreateVolume(t.Context(), h.Tenant("volume"), capacity.NewVolume{
		ProjectID: h.Project.ID, Name: "models", SizeBytes: 64 << 20,
	})
	require.NoError(t, err)
	state, _ := l.ExpectVolumes(1)
	reportVolume(l, state, &protocol.VolumeStatus{Id: v.ID, SizeBytes: 64 << 20})
	snapshot, err := commands.CreateVolumeSnapshot(t.Context(), h.Tenant("snapshot"), h.Project.ID, v.ID, "")
	require.NoError(t, err)
	reportVolume(l, state, &protocol.VolumeStatus{
		Id: v.ID, SizeBytes: 64 << 20,
		Snapshots: []*protocol.SnapshotStatus{{Id: snapshot.ID, Status: protocol.VolumeStatus_READY}},
	})
	backup := h.Backup()
	_, err = commands.RestoreVolume(t.Context(), h.Tenant("restore"), h.Project.ID, v.ID, snapshot.ID)
	require.NoError(t, err)
	reportVolume(l, state, &protocol.VolumeStatus{Id: v.ID, SizeBytes: 64 << 20, RestoreNo: 1})
	_, err = commands.ResizeVolume(t.Context(), h.Tenant("resize"), h.Project.ID, v.ID, 96<<20)
	require.NoError(t, err)
	var push *protocol.PushState
	for state.GetVolumes()[0].GetSizeBytes() != 96<<20 {
		state, push = l.ExpectVolumes(1)
	}
	require.NoError(t, l.Conn.Close(0, "the hub is gone"))

	again := h.Restore(backup)
	n.Hub = again
	l = n.Connect(holds("i1", state, push.GetEnvelope()))
	l.UploadState(&protocol.StateUpload{State: push.GetEnvelope(), Bundle: n.Bundle.Envelope(), Last: true})
	takeBundle(t, n, l)
	now, _ := l.ExpectVolumes(1)
	require.True(t, proto.Equal(state.GetVolumes()[0], now.GetVolumes()[0]), "%v", now.GetVolumes()[0])
	require.Equal(t, map[string]string{finding.Volume: v.ID}, again.Findings())
	got := func() capacity.Volume {
		return hubtest.Tx(again, func(ctx context.Context, tx db.Tx) (capacity.Volume, error) {
			return capacity.GetVolume(ctx, tx, h.Project.ID, v.ID)
		})
	}
	require.Equal(t, capacity.VolumeRestoring, got().Status, "until its node has said that it is done")

	reportVolume(l, now, &protocol.VolumeStatus{Id: v.ID, SizeBytes: 96 << 20, RestoreNo: 1})
	require.Equal(t, capacity.VolumeReady, got().Status)
	require.Equal(t, 1, hubtest.Count(again, `SELECT count(*) FROM subjects WHERE id = $1 AND volume_bytes = $2`, v.ID,
		(96+64)<<20))
	restored, err := (&command.Service{DB: again.DB}).RestoreVolume(t.Context(), again.Tenant("restore"), h.Project.ID,
		v.ID, snapshot.ID)
	require.NoError(t, err)
	require.EqualValues(t, 2, restored.RestoreNo)
}

// Law 16: what was deleted after the backup is not missing, nor billed; what was made since has its project, also where
// no instance names that.
func TestLaw16VolumesThatWereDeletedOrMadeAfterTheBackup(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	commands := &command.Service{DB: h.DB}
	create := func(projectID, name string) capacity.Volume {
		_, err := commands.CreateAllocation(t.Context(), h.Tenant("allocation-"+name), capacity.NewAllocation{
			ProjectID: projectID, Shape: capacity.GPUSlice, CPUCores: 1, MemoryMiB: 1024,
		})
		require.NoError(t, err)
		v, err := commands.CreateVolume(t.Context(), h.Tenant("volume-"+name), capacity.NewVolume{
			ProjectID: projectID, Name: name, SizeBytes: 64 << 20,
		})
		require.NoError(t, err)
		return v
	}
	gone := create(h.Project.ID, "gone")
	state, push := l.ExpectVolumes(1)
	reportVolume(l, state, &protocol.VolumeStatus{Id: gone.ID, SizeBytes: 64 << 20})
	backup := h.Backup()

	later := hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (iam.Project, error) {
		return iam.CreateProject(ctx, tx, iam.Project{
			ID: db.NewID(), OrgID: h.Project.OrgID, Slug: "later", DisplayName: "Later", CreatedAt: h.Now(),
		})
	})
	made := create(later.ID, "made")
	state, _ = l.ExpectVolumes(2)
	reportVolume(l, state, &protocol.VolumeStatus{Id: made.ID, SizeBytes: 64 << 20})
	_, err := commands.DeleteVolume(t.Context(), h.Tenant("delete"), h.Project.ID, gone.ID)
	require.NoError(t, err)
	reportVolume(l, state, &protocol.VolumeStatus{Id: gone.ID, Status: protocol.VolumeStatus_DELETED})
	for state.GetVolumes()[0].GetId() != made.ID || !state.GetVolumes()[0].GetMade() {
		state, push = l.ExpectVolumes(1)
	}
	require.NoError(t, l.Conn.Close(0, "the hub is gone"))

	again := h.Restore(backup)
	n.Hub = again
	l = n.Connect(holds("i1", state, push.GetEnvelope()))
	l.UploadState(&protocol.StateUpload{State: push.GetEnvelope(), Bundle: n.Bundle.Envelope(), Last: true})
	takeBundle(t, n, l)
	now, _ := l.ExpectVolumes(2)
	deleted := map[string]bool{}
	for _, v := range now.GetVolumes() {
		deleted[v.GetId()] = v.GetDeleted()
	}
	require.Equal(t, map[string]bool{gone.ID: true, made.ID: false}, deleted)
	project := hubtest.Tx(again, func(ctx context.Context, tx db.Tx) (iam.Project, error) {
		return iam.GetProject(ctx, tx, later.ID)
	})
	require.Equal(t, h.Project.OrgID, project.OrgID)
	require.Equal(t, later.ID, again.Findings()[finding.Project])

	open := func() int {
		return hubtest.Count(again, `SELECT count(*) FROM subjects WHERE id = $1 AND closed_at IS NULL`, gone.ID)
	}
	require.Equal(t, 1, open())
	reportVolume(l, now, &protocol.VolumeStatus{Id: gone.ID, Status: protocol.VolumeStatus_DELETED})
	require.Zero(t, open())
}

// Law 16: a volume that one instance gave up after the backup has another writer. The rows still know the one before,
// and the node that runs the other must not wait for them.
func TestLaw16AVolumeHasTheWriterThatItsNodeWasTold(t *testing.T) {
	h, n, l, v := hubtest.NewWithVolume(t)
	before := h.LaunchOn(v)
	state, _ := l.ExpectState(1)
	l.Report(state.GetGeneration(), hubtest.Ready(before))
	backup := h.Backup()

	h.Decommission(before.ID)
	state, _ = l.ExpectState(0)
	l.Report(state.GetGeneration(), &protocol.WorkloadStatus{
		MemberId: before.Members[0].ID, InstanceId: before.ID, Status: protocol.WorkloadStatus_REMOVED,
		Removal: &protocol.RemovalProof{At: timestamppb.Now(), Absent: protocol.RemovalKinds(), Incarnation: "i1"},
	})
	made := h.LaunchOn(v)
	state, push := l.ExpectState(1)
	leases := h.SignedLeases(l)
	require.NoError(t, l.Conn.Close(0, "the hub is gone"))

	again := h.Restore(backup)
	n.Hub = again
	l = n.Connect(holds("i1", state, push.GetEnvelope()))
	l.UploadState(&protocol.StateUpload{
		State: push.GetEnvelope(), Parts: push.GetParts(), Leases: []*protocol.Envelope{leases},
		Bundle: n.Bundle.Envelope(), Last: true,
	})
	takeBundle(t, n, l)
	now, compiled := l.ExpectState(1)
	require.ElementsMatch(t, push.GetParts(), compiled.GetParts())
	l.ReportState(now, hubtest.Ready(made))
	require.Equal(t, lifecycle.Running, again.Instance(made.ID).Lifecycle.Status)
	require.Equal(t, lifecycle.Decommissioned, again.Instance(before.ID).Lifecycle.Status)
	got := hubtest.Tx(again, func(ctx context.Context, tx db.Tx) (capacity.Volume, error) {
		return capacity.GetVolume(ctx, tx, h.Project.ID, v.ID)
	})
	require.Equal(t, []string{made.Members[0].ID}, got.UsedBy)
}
