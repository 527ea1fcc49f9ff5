package lifecycle_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestLaw13AbsenceProvesWhatItCan(t *testing.T) {
	never := lifecycle.Absence{Epoch: 1, Generation: 5}
	observed := lifecycle.Absence{Epoch: 1, Generation: 5, Observed: true, ObservedIncarnation: "i1"}
	for name, c := range map[string]struct {
		absence           lifecycle.Absence
		epoch, generation uint64
		incarnation       string
		proven            bool
	}{
		"never observed":                             {never, 1, 5, "i1", true},
		"never observed, a later epoch":              {never, 2, 1, "i1", true},
		"never observed, but it may still come":      {never, 1, 4, "i1", false},
		"not asked to go yet":                        {lifecycle.Absence{}, 1, 9, "i1", false},
		"absent in the incarnation that reported it": {observed, 1, 9, "i1", false},
		"absent in another incarnation":              {observed, 1, 5, "i2", true},
		"absent in another, with an older state":     {observed, 1, 4, "i2", false},
		"absent, and the incarnation is unknown": {
			lifecycle.Absence{Epoch: 1, Generation: 5, Observed: true},
			1, 5, "i2",
			false,
		},
		"absent, and the node does not say who it is": {observed, 1, 5, "", false},
	} {
		require.Equal(t, c.proven, c.absence.Proven(c.epoch, c.generation, c.incarnation), name)
	}
}

func TestReportsOfANodeAreOrderedBySessionThenCounter(t *testing.T) {
	newest := lifecycle.ReportNo{Session: 4, Counter: 7}
	for no, follows := range map[lifecycle.ReportNo]bool{
		{Session: 4, Counter: 8}: true,
		{Session: 5, Counter: 1}: true,
		newest:                   false,
		{Session: 4, Counter: 6}: false,
		{Session: 3, Counter: 9}: false,
	} {
		require.Equal(t, follows, no.Follows(newest), "%+v", no)
	}
	require.True(t, lifecycle.ReportNo{Session: 1, Counter: 1}.Follows(lifecycle.ReportNo{}), "the first one")
}

func TestLaw09OnlyAWholeProofOfRemovalEndsAMember(t *testing.T) {
	whole := &protocol.RemovalProof{At: timestamppb.New(time.Unix(1, 0)), Absent: protocol.RemovalKinds()}
	half := &protocol.RemovalProof{At: whole.GetAt(), Absent: protocol.RemovalKinds()[1:]}
	for name, c := range map[string]struct {
		desired bool
		status  protocol.WorkloadStatus_Status
		proof   *protocol.RemovalProof
		want    lifecycle.Outcome
	}{
		"proven":             {false, protocol.WorkloadStatus_REMOVED, whole, lifecycle.Removed},
		"without a proof":    {false, protocol.WorkloadStatus_REMOVED, nil, lifecycle.Reported},
		"half a proof":       {false, protocol.WorkloadStatus_REMOVED, half, lifecycle.Reported},
		"still desired":      {true, protocol.WorkloadStatus_REMOVED, whole, lifecycle.Reported},
		"still something":    {false, protocol.WorkloadStatus_STOPPED, whole, lifecycle.Reported},
		"still there at all": {false, protocol.WorkloadStatus_READY, nil, lifecycle.Reported},
	} {
		p := lifecycle.Placed{Desired: c.desired}
		got, outcome := p.Apply(&protocol.WorkloadStatus{Status: c.status, Removal: c.proof}, lifecycle.Report{}, time.Now())
		require.Equal(t, c.want, outcome, name)
		require.Equal(t, c.want == lifecycle.Removed, got.Gone, name)
	}
}
