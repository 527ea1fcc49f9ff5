package nodes_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/protocol"
)

// The node reports nothing new of a member whose containers it had stopped before, when the lease ended.
func TestAnInstanceWhoseLeaseHasEndedCanBeStopped(t *testing.T) {
	h, _, l := hubtest.NewWithNode(t)
	i, member, _ := hubtest.Running(t, h, l)
	stopped := &protocol.WorkloadStatus{
		MemberId: member, InstanceId: i.ID, Revision: 1, Status: protocol.WorkloadStatus_STOPPED,
		Reason: protocol.WorkloadStatus_LEASE_ENDED,
	}
	l.Report(2, stopped)
	_, err := (&command.Service{DB: h.DB}).StopInstance(t.Context(), h.Tenant("stop"), h.Project.ID, i.ID)
	require.NoError(t, err)
	state, _ := l.ExpectState(1)
	stopped.Reason = 0
	l.Report(state.GetGeneration(), stopped)
	require.Equal(t, lifecycle.Stopped, h.Instance(i.ID).Lifecycle.Status)
}
