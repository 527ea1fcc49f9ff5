package httpapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"time"

	"github.com/gin-gonic/gin"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
)

// maxRequestIDBytes bounds X-Request-ID; a longer one is replaced.
const maxRequestIDBytes = 128

// observe gives every request a correlation id, a span, a metric and a line in the log.
func (a *api) observe(c *gin.Context) {
	start := a.conf.Now()
	state := &call{
		correlationID: requestID(c.Request.Header), at: start.UTC().Truncate(time.Microsecond),
		remoteIP: remoteIP(c.Request.RemoteAddr),
	}
	state.op = a.operations[c.Request.Method+" "+c.FullPath()]
	route := "unmatched"
	if state.op != nil {
		route = state.op.template
	}
	ctx := telemetry.WithFields(a.continued(c.Request.Context(), c.Request.Header, state), telemetry.Fields{
		CorrelationID: state.correlationID,
		OrgID:         idParam(c, "org_id"),
		ProjectID:     idParam(c, "project_id"),
		AppInstanceID: idParam(c, "app_instance_id"),
	})
	ctx, span := a.tracer.Start(ctx, c.Request.Method+" "+route, trace.WithSpanKind(trace.SpanKindServer),
		trace.WithAttributes(
			attribute.String("http.request.method", methodLabel(c.Request.Method)),
			attribute.String("http.route", route),
			attribute.String("gpuaas.correlation_id", state.correlationID),
		))
	defer span.End()
	state.traceparent = telemetry.Traceparent(ctx)
	c.Request = c.Request.WithContext(ctx)
	withCall(c, state)
	c.Header(requestIDHeader, state.correlationID)

	a.guarded(c)

	status, took := c.Writer.Status(), a.conf.Now().Sub(start)
	span.SetAttributes(attribute.Int("http.response.status_code", status))
	if status >= http.StatusInternalServerError {
		span.SetStatus(codes.Error, string(state.failure))
	}
	a.duration.Record(ctx, took.Seconds(), metric.WithAttributes(
		attribute.String("http.request.method", methodLabel(c.Request.Method)),
		attribute.String("http.route", route),
		attribute.Int("http.response.status_code", status),
	))
	a.logRequest(c.Request, route, status, max(0, int64(c.Writer.Size())), took,
		slog.String("code", string(state.failure)), slog.String("principal_type", string(state.principal.Type)),
		slog.String("principal_id", state.principal.ID), slog.String("principal_org_id", state.principal.OrgID),
		slog.String("remote_ip", state.remoteIP))
}

// continued is within the span of the caller's traceparent header. Whether the trace is sent to the collector, a caller
// may say within its budget: anybody may send the header.
func (a *api) continued(ctx context.Context, h http.Header, state *call) context.Context {
	header := h.Get("traceparent")
	inTrace := telemetry.Continue(ctx, header)
	if !trace.SpanContextFromContext(inTrace).IsSampled() ||
		a.budgets.spend(a.budgets.ofTrace(state.remoteIP), state.at) == nil {
		return inTrace
	}
	return telemetry.ContinueUnsampled(ctx, header)
}

// idParam returns an id of the path; empty where it is none, which the contract refuses.
func idParam(c *gin.Context, name string) string {
	if id := c.Param(name); db.IsID(id) {
		return id
	}
	return ""
}

// logRequest writes the line that each request has in the log.
func (a *api) logRequest(r *http.Request, route string, status int, bytes int64, took time.Duration,
	more ...slog.Attr,
) {
	a.conf.Log.LogAttrs(r.Context(), levelOf(status), "request", append([]slog.Attr{
		slog.String("method", methodLabel(r.Method)), slog.String("route", route), slog.Int("status", status),
		slog.Int64("duration_us", took.Microseconds()), slog.Int64("response_bytes", bytes),
	}, more...)...)
}

func (a *api) logPanic(ctx context.Context, p any) {
	a.conf.Log.ErrorContext(ctx, "panic", slog.String("panic", fmt.Sprint(p)),
		slog.String("stack", string(debug.Stack())))
}

// errPanic is a panic in a handler; the log has its text.
var errPanic = errors.New("panic")

// guarded runs the other handlers and answers a panic with a 500 that has no details.
func (a *api) guarded(c *gin.Context) {
	defer func() {
		if p := recover(); p != nil {
			if p == http.ErrAbortHandler { //nolint:errorlint // the documented sentinel, compared as net/http does
				panic(p)
			}
			a.logPanic(c.Request.Context(), p)
			a.fail(c, fault.As(errPanic))
		}
	}()
	c.Next()
}

// requestID takes the caller's id where it is harmless to repeat in logs and headers, and makes one otherwise.
func requestID(h http.Header) string {
	id := h.Get(requestIDHeader)
	if id == "" || len(id) > maxRequestIDBytes {
		return db.NewID()
	}
	for _, r := range []byte(id) {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '.', r == '_', r == '-':
		default:
			return db.NewID()
		}
	}
	return id
}

// methodLabel keeps metric labels and log lines bounded: the method is the caller's text.
func methodLabel(method string) string {
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete,
		http.MethodOptions:
		return method
	default:
		return "other"
	}
}

// levelOf keeps refused floods out of the log; the metric counts them.
func levelOf(status int) slog.Level {
	if status == http.StatusTooManyRequests {
		return slog.LevelDebug
	}
	if status >= http.StatusInternalServerError && status != http.StatusServiceUnavailable {
		return slog.LevelError
	}
	return slog.LevelInfo
}
