package nodes_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
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
