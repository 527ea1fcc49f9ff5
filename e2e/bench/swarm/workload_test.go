package swarm

import (
	"crypto/sha256"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/protocol"
)

func TestANodeReportsWhatItsStateNames(t *testing.T) {
	state, parts := &protocol.DesiredState{}, [][]byte(nil)
	for _, w := range []*protocol.Workload{
		{Id: "m1", InstanceId: "i1", Revision: 2, CorrelationId: "c"},
		{Id: "m2", InstanceId: "i2", Revision: 1, Stopped: true},
	} {
		document, err := proto.Marshal(w)
		require.NoError(t, err)
		sum := sha256.Sum256(document)
		state.Parts = append(state.Parts, &protocol.PartRef{Id: w.GetId(), Sha256: sum[:]})
		parts = append(parts, document)
	}
	named, err := workloadsOf(state, parts)
	require.NoError(t, err)
	statuses := statusesOf(succeed(nil, named, time.Unix(100, 0)), net.IPv4(127, 64, 0, 1), "incarnation")
	require.Len(t, statuses, 2)
	require.Equal(t, protocol.WorkloadStatus_READY, statuses[0].GetStatus())
	require.Equal(t, "i1", statuses[0].GetInstanceId())
	require.EqualValues(t, 2, statuses[0].GetRevision())
	require.Equal(t, protocol.WorkloadStatus_STOPPED, statuses[1].GetStatus())
	_, err = workloadsOf(state, parts[:1])
	require.ErrorContains(t, err, "m2")
}

func TestAWorkloadKeepsItsStartAndIsProvedGoneOnce(t *testing.T) {
	first := succeed(nil, []workload{{member: "m1", revision: 1}, {member: "m2", revision: 1}}, time.Unix(100, 0))
	second := succeed(first, []workload{{member: "m1", revision: 1}}, time.Unix(200, 0))
	require.Equal(t, time.Unix(100, 0), second[0].since)
	statuses := statusesOf(second, net.IPv4(127, 64, 0, 1), "incarnation")
	require.Len(t, statuses, 2)
	require.Equal(t, protocol.WorkloadStatus_REMOVED, statuses[1].GetStatus())
	require.Equal(t, protocol.RemovalKinds(), statuses[1].GetRemoval().GetAbsent())
	require.Len(t, succeed(second, []workload{{member: "m1", revision: 2}}, time.Unix(300, 0)), 1)
}
