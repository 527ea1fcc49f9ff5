package reconcile

import (
	"context"
	"fmt"
	"strings"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/protocol"
)

// workContext is for work on a member: in the trace of the command that asked for its revision, with log fields. Of a
// member that has left the state, those that the node still knows.
func (r *Reconciler) workContext(ctx context.Context, memberID string) context.Context {
	for _, p := range r.store.Accepted().Parts {
		if p.MemberID == memberID && p.Workload != nil {
			return telemetry.Continue(telemetry.WithFields(ctx, fieldsOf(p.Workload)), p.Workload.GetTraceparent())
		}
	}
	m, _ := r.store.Member(memberID)
	return telemetry.WithFields(ctx, telemetry.Fields{CorrelationID: m.CorrelationID, AppInstanceID: m.InstanceID})
}

func fieldsOf(w *protocol.Workload) telemetry.Fields {
	return telemetry.Fields{
		CorrelationID:     w.GetCorrelationId(),
		OrgID:             w.GetOrgId(),
		ProjectID:         w.GetProjectId(),
		AppInstanceID:     w.GetInstanceId(),
		OperatingMode:     w.GetOperatingMode(),
		ControlPlaneScope: w.GetControlPlaneScope(),
		RuntimeBackend:    w.GetRuntimeBackend(),
	}
}

// traced makes an action a span of the trace that ctx is in, named by its type. Outside of a trace it makes none.
func traced(ctx context.Context, a agent.Action, work func(context.Context) error) error {
	if !trace.SpanContextFromContext(ctx).IsValid() {
		return work(ctx)
	}
	name := strings.TrimPrefix(fmt.Sprintf("%T", a), "agent.")
	ctx, span := otel.Tracer("gpuaas/reconcile").Start(ctx, name, trace.WithAttributes(
		attribute.String("gpuaas.member_id", agent.MemberOf(a)),
		attribute.String("gpuaas.service", agent.ServiceOf(a)),
	))
	err := work(ctx)
	telemetry.EndSpan(span, err)
	return err
}
