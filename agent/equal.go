package agent

import (
	"bytes"
	"slices"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/protocol"
)

// EqualStatuses reports whether two lists of Statuses say the same. Every pass compares them, so it compares fields and
// not reflected messages.
func EqualStatuses(a, b []*protocol.WorkloadStatus) bool { return slices.EqualFunc(a, b, equalStatus) }

func equalStatus(a, b *protocol.WorkloadStatus) bool {
	return a.GetMemberId() == b.GetMemberId() && a.GetInstanceId() == b.GetInstanceId() &&
		a.GetRevision() == b.GetRevision() && a.GetStatus() == b.GetStatus() && a.GetReason() == b.GetReason() &&
		a.GetDetail() == b.GetDetail() && equalTime(a.GetStartedAt(), b.GetStartedAt()) &&
		equalTime(a.GetReadyAt(), b.GetReadyAt()) && equalTime(a.GetExitedAt(), b.GetExitedAt()) &&
		a.GetExitCode() == b.GetExitCode() && a.GetRestarts() == b.GetRestarts() &&
		a.GetCorrelationId() == b.GetCorrelationId() && a.GetTraceparent() == b.GetTraceparent() &&
		a.GetFallbackFromRevision() == b.GetFallbackFromRevision() &&
		slices.EqualFunc(a.GetEndpoints(), b.GetEndpoints(), same) && same(a.GetRemoval(), b.GetRemoval()) &&
		same(a.GetOwnerRefusal(), b.GetOwnerRefusal()) && bytes.Equal(a.GetConfigSha256(), b.GetConfigSha256()) &&
		slices.EqualFunc(a.GetServices(), b.GetServices(), same)
}

func equalTime(a, b *timestamppb.Timestamp) bool {
	return (a == nil) == (b == nil) && a.GetSeconds() == b.GetSeconds() && a.GetNanos() == b.GetNanos()
}

// same is proto.Equal, which does not know that a message equals itself.
func same[M interface {
	comparable
	proto.Message
}](a, b M) bool {
	return a == b || proto.Equal(a, b)
}
