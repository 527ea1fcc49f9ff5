package admission_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/admission"
	"github.com/gpuaas/gpuaas/agent/policy"
	"github.com/gpuaas/gpuaas/protocol"
)

// A fallback runs without anybody's asking again, so manifest and owner decide about it like about any other revision.
func TestLaw15TheOwnersPolicyDecidesAboutAFallback(t *testing.T) {
	document := &protocol.Workload{Id: "m", Revision: 2, Fallback: &protocol.Workload{Id: "m", Revision: 1}}
	under := func(d admission.Decision, owner policy.Policy) agent.Workload {
		return d.Workload("m", document, owner)
	}
	both := admission.Decision{Admitted: true, FallbackAdmitted: true}
	open := under(both, policy.Policy{})
	require.Zero(t, open.Refused)
	require.Zero(t, open.Fallback.Refused)
	closed := under(both, policy.Policy{Closed: true})
	require.Equal(t, protocol.WorkloadStatus_OWNER_REFUSED, closed.Refused)
	require.Equal(t, protocol.WorkloadStatus_OWNER_REFUSED, closed.Fallback.Refused)
	require.Nil(t, under(admission.Decision{Admitted: true}, policy.Policy{}).Fallback,
		"one that the manifest does not admit is none")
	fallback := admission.Decision{Reason: protocol.WorkloadStatus_MANIFEST_NOT_ADMITTED, FallbackAdmitted: true}
	refused := under(fallback, policy.Policy{})
	require.Equal(t, protocol.WorkloadStatus_MANIFEST_NOT_ADMITTED, refused.Refused)
	require.Zero(t, refused.Fallback.Refused)
	require.Equal(t, protocol.WorkloadStatus_OWNER_REFUSED, under(fallback, policy.Policy{Closed: true}).Refused,
		"the owner's refusal comes first")
}
