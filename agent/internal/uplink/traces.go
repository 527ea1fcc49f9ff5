package uplink

import (
	"context"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/protocol"
)

// traced begins a span after the one that a traceparent header names; without a header it begins none.
func traced(ctx context.Context, traceparent, name string, attributes ...attribute.KeyValue,
) (_ context.Context, end func(error)) {
	if traceparent == "" {
		return ctx, func(error) {}
	}
	ctx, span := otel.Tracer("gpuaas/uplink").Start(telemetry.Continue(ctx, traceparent), name,
		trace.WithAttributes(attributes...))
	return ctx, func(err error) { telemetry.EndSpan(span, err) }
}

// reportedStatus is what the hub was told of a member last.
type reportedStatus struct {
	revision uint64
	status   protocol.WorkloadStatus_Status
}

// traceStatuses makes each status that is new to the hub a span of its member's trace, which the hub's decision
// follows. The statuses themselves stay as they are: others read them.
func (s *session) traceStatuses(ctx context.Context, workloads []*protocol.WorkloadStatus) (end func(error)) {
	var ends []func(error)
	reported := make(map[string]reportedStatus, len(workloads))
	for n, w := range workloads {
		now := reportedStatus{w.GetRevision(), w.GetStatus()}
		reported[w.GetMemberId()] = now
		if s.reported[w.GetMemberId()] == now || w.GetTraceparent() == "" {
			continue
		}
		ctx, end := traced(ctx, w.GetTraceparent(), "report "+w.GetStatus().Text(),
			attribute.String("gpuaas.member_id", w.GetMemberId()))
		workloads[n] = proto.CloneOf(w)
		workloads[n].Traceparent = telemetry.Traceparent(ctx)
		ends = append(ends, end)
	}
	s.reported = reported
	return func(err error) {
		for _, end := range ends {
			end(err)
		}
	}
}
