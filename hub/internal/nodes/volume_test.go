package nodes_test

import (
	"context"
	"crypto/ed25519"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/protocol"
)

// The report that the volume is made says nothing else that is new: nothing runs on the node.
func TestAVolumeOfANodeWithoutInstancesBecomesReady(t *testing.T) {
	h, _, l := hubtest.NewWithNode(t)
	commands := &command.Service{DB: h.DB}
	_, err := commands.CreateAllocation(t.Context(), h.Tenant("allocation"), capacity.NewAllocation{
		ProjectID: h.Project.ID, Shape: capacity.GPUSlice, CPUCores: 1, MemoryMiB: 1024,
	})
	require.NoError(t, err)
	v, err := commands.CreateVolume(t.Context(), h.Tenant("volume"), capacity.NewVolume{
		ProjectID: h.Project.ID, Name: "data", SizeBytes: 64 << 20,
	})
	require.NoError(t, err)
	state, _ := l.ExpectVolumes(1)
	l.Report(state.GetGeneration())

	l.Counter++
	l.Send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Report{Report: &protocol.Report{
		Counter: l.Counter, At: timestamppb.Now(), Epoch: state.GetEpoch(), Generation: state.GetGeneration(),
		Volumes: []*protocol.VolumeStatus{{Id: v.ID, Status: protocol.VolumeStatus_READY}},
	}}})
	hubtest.Next(l, func(m *protocol.HubMessage) (bool, bool) { return true, m.GetReportAck().GetCounter() == l.Counter })
	v = hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (capacity.Volume, error) {
		return capacity.GetVolume(ctx, tx, h.Project.ID, v.ID)
	})
	require.Equal(t, capacity.VolumeReady, v.Status)
}

// A volume whose bill cannot be closed keeps nothing else that its node says from the hub. It is a finding, and
// the report is not acknowledged, so that the node repeats it.
func TestAVolumeThatCannotBeBilledHoldsUpNothingElseOfItsNode(t *testing.T) {
	h, n, l, v := hubtest.NewWithVolume(t)
	running := h.LaunchOn(v)
	commands := &command.Service{DB: h.DB}
	gone, err := commands.CreateVolume(t.Context(), h.Tenant("second"), capacity.NewVolume{
		ProjectID: h.Project.ID, Name: "second", SizeBytes: 64 << 20,
	})
	require.NoError(t, err)
	state, _ := l.ExpectVolumes(2)
	l.ReportVolume(state, &protocol.VolumeStatus{Id: gone.ID, Status: protocol.VolumeStatus_READY, SizeBytes: 64 << 20})
	_, err = commands.DeleteVolume(t.Context(), h.Tenant("delete"), h.Project.ID, gone.ID)
	require.NoError(t, err)
	exec := func(statement string) {
		t.Helper()
		hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (pgconn.CommandTag, error) { return tx.Exec(ctx, statement) })
	}
	status := func() capacity.VolumeStatus {
		return hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (capacity.Volume, error) {
			return capacity.GetVolume(ctx, tx, h.Project.ID, gone.ID)
		}).Status
	}
	exec(`ALTER TABLE subjects ADD CONSTRAINT poison CHECK (closed_at IS NULL)`)
	pub, _ := n.Key.Public().(ed25519.PublicKey)
	report := func() error {
		l.Counter++
		return h.Nodes.Report(t.Context(), nodelink.Peer{NodeID: n.ID, Key: pub}, l.Welcome.GetSessionNo(), &protocol.Report{
			Counter: l.Counter, At: timestamppb.Now(), Epoch: 1, Generation: state.GetGeneration(),
			Workloads: []*protocol.WorkloadStatus{hubtest.Ready(running)},
			Volumes: []*protocol.VolumeStatus{
				{Id: gone.ID, Status: protocol.VolumeStatus_DELETED}, {Id: v.ID, Status: protocol.VolumeStatus_MISSING},
			},
		})
	}
	require.Error(t, report())
	require.Equal(t, lifecycle.Running, h.Instance(running.ID).Lifecycle.Status)
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM volumes WHERE id = $1 AND status = 'missing'`, v.ID))
	require.Equal(t, capacity.VolumeDeleting, status())
	require.Equal(t, gone.ID, h.Findings()[finding.Report])

	exec(`ALTER TABLE subjects DROP CONSTRAINT poison`)
	require.NoError(t, report())
	require.Equal(t, capacity.VolumeDeleted, status())
	require.NotContains(t, h.Findings(), finding.Report)
}
