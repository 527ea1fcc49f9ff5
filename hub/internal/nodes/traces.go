package nodes

import (
	"context"
	"log/slog"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
)

// traceChanges writes a log line and a span for each step of an instance that a report led to, after its commit: a
// transaction may run several times. The trace is the one of what was last asked of the instance; a node may say which
// of its spans comes before, and nothing else.
func (svc *Service) traceChanges(ctx context.Context, out reportResult, began time.Time) {
	for _, c := range out.changes {
		operation := c.Instance.Operation
		fields := c.Instance.LogFields()
		fields.CorrelationID = operation.CorrelationID
		ctx := telemetry.WithFields(telemetry.Continue(ctx, parentOf(c.Instance, out.report)), fields)
		for _, step := range c.Steps {
			stepCtx := ctx
			if operation.Traceparent != "" {
				var span trace.Span
				stepCtx, span = otel.Tracer("gpuaas/nodes").Start(ctx, "accept "+string(step.To),
					trace.WithTimestamp(began), trace.WithAttributes(
						attribute.String("gpuaas.app_instance_id", c.Instance.ID),
						attribute.String("gpuaas.node_id", out.report.NodeID),
						attribute.String("gpuaas.correlation_id", operation.CorrelationID),
					))
				span.End()
			}
			svc.Log.InfoContext(stepCtx, "app instance", slog.String("from", string(step.From)),
				slog.String("to", string(step.To)), slog.String("reason", step.Reason.Text()),
				slog.String("node_id", out.report.NodeID))
		}
	}
}

// parentOf is the node's span that led to the change of an instance, where it is part of the operation's trace; else
// the span of the operation.
func parentOf(i instance.Instance, r Report) string {
	for _, s := range r.Statuses {
		if s.GetInstanceId() == i.ID && s.GetTraceparent() != "" {
			return telemetry.Within(i.Operation.Traceparent, s.GetTraceparent())
		}
	}
	return i.Operation.Traceparent
}
