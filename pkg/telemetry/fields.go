package telemetry

import (
	"cmp"
	"context"
	"log/slog"
	"sync"

	"go.opentelemetry.io/otel/trace"
)

// Fields are what log lines of hub and agent have in common, beside trace_id: a line has those that apply to its work.
type Fields struct {
	CorrelationID                                    string
	OrgID, ProjectID, AppInstanceID                  string
	OperatingMode, ControlPlaneScope, RuntimeBackend string
}

// or completes f with what only g has.
func (f Fields) or(g Fields) Fields {
	return Fields{
		CorrelationID:     cmp.Or(f.CorrelationID, g.CorrelationID),
		OrgID:             cmp.Or(f.OrgID, g.OrgID),
		ProjectID:         cmp.Or(f.ProjectID, g.ProjectID),
		AppInstanceID:     cmp.Or(f.AppInstanceID, g.AppInstanceID),
		OperatingMode:     cmp.Or(f.OperatingMode, g.OperatingMode),
		ControlPlaneScope: cmp.Or(f.ControlPlaneScope, g.ControlPlaneScope),
		RuntimeBackend:    cmp.Or(f.RuntimeBackend, g.RuntimeBackend),
	}
}

// work is what one piece of work, like a request, has found out about itself.
type work struct {
	mu     sync.Mutex
	fields Fields
}

func (w *work) get() Fields {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.fields
}

type workKey struct{}

// WithFields begins a piece of work whose log lines have these fields, and those of ctx that it does not name.
func WithFields(ctx context.Context, f Fields) context.Context {
	return context.WithValue(ctx, workKey{}, &work{fields: f.or(FieldsOf(ctx))})
}

// SetFields adds what became known in the middle of the work, for all its later lines. Outside of WithFields it does
// nothing.
func SetFields(ctx context.Context, f Fields) {
	if w, ok := ctx.Value(workKey{}).(*work); ok {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.fields = f.or(w.fields)
	}
}

// FieldsOf returns the fields of the work that ctx is in.
func FieldsOf(ctx context.Context) Fields {
	if w, ok := ctx.Value(workKey{}).(*work); ok {
		return w.get()
	}
	return Fields{}
}

// contextAttrs are the fields and ids that a log line in ctx has.
func contextAttrs(ctx context.Context) []slog.Attr {
	var attrs []slog.Attr
	add := func(key, value string) {
		if value != "" {
			attrs = append(attrs, slog.String(key, value))
		}
	}
	f := FieldsOf(ctx)
	add("correlation_id", f.CorrelationID)
	if sc := trace.SpanContextFromContext(ctx); sc.IsValid() {
		add("trace_id", sc.TraceID().String())
		add("span_id", sc.SpanID().String())
	}
	add("org_id", f.OrgID)
	add("project_id", f.ProjectID)
	add("app_instance_id", f.AppInstanceID)
	add("operating_mode", f.OperatingMode)
	add("control_plane_scope", f.ControlPlaneScope)
	add("runtime_backend", f.RuntimeBackend)
	return attrs
}
