package reconcile

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/policy"
	"github.com/gpuaas/gpuaas/protocol"
)

// A fallback runs without anybody's asking again, so manifest and owner decide about it like about any other revision.
func TestLaw15TheOwnersPolicyDecidesAboutAFallback(t *testing.T) {
	part := state.Part{
		MemberID: "m", Workload: &protocol.Workload{Id: "m", Revision: 2, Fallback: &protocol.Workload{Id: "m", Revision: 1}},
		Admission: &state.AdmissionDecision{Admitted: true, FallbackAdmitted: true},
	}
	open := workloadOf(part, policy.Policy{})
	require.Zero(t, open.Refused)
	require.Zero(t, open.Fallback.Refused)
	closed := workloadOf(part, policy.Policy{Closed: true})
	require.Equal(t, protocol.WorkloadStatus_OWNER_REFUSED, closed.Refused)
	require.Equal(t, protocol.WorkloadStatus_OWNER_REFUSED, closed.Fallback.Refused)
	part.Admission = &state.AdmissionDecision{Admitted: true}
	require.Nil(t, workloadOf(part, policy.Policy{}).Fallback, "one that the manifest does not admit is none")
	part.Admission = &state.AdmissionDecision{
		Reason: protocol.WorkloadStatus_MANIFEST_NOT_ADMITTED, FallbackAdmitted: true,
	}
	refused := workloadOf(part, policy.Policy{})
	require.Equal(t, protocol.WorkloadStatus_MANIFEST_NOT_ADMITTED, refused.Refused)
	require.Zero(t, refused.Fallback.Refused)
	require.Equal(t, protocol.WorkloadStatus_OWNER_REFUSED, workloadOf(part, policy.Policy{Closed: true}).Refused,
		"the owner's refusal comes first")
}
