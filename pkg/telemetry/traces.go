// Package telemetry sets up a daemon's logs and traces: lines and spans without secrets, tied to each other by the
// trace's id. It owns the fields that log lines have in common, and the list of secret names. What is logged or traced
// belongs to the packages that do so; package metrics below it has the metrics.
package telemetry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	// ownTracers is how the names of this project's tracers begin.
	ownTracers = "gpuaas/"
	// closeTimeout bounds how long a collector that does not answer delays the end of a daemon.
	closeTimeout = 2 * time.Second
	traceparent  = "traceparent"
)

const (
	// codeTraceSettings: a variable of OpenTelemetry has a value that this program cannot follow.
	codeTraceSettings fault.Code = "trace_settings_unsupported"
)

// Program names what sends traces.
type Program struct {
	// Service is gpuaas-hub or gpuaas-agent; Instance is the hub's or the node's id.
	Service, Version, Instance string
}

// StartTraces sends spans to the collector that OpenTelemetry's environment variables name
// (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER and the others of its specification). Without a collector no span
// is recorded, and the ids of traces are made and passed on all the same. stop sends what is left; it waits for no
// collector that does not answer.
func StartTraces(ctx context.Context, program Program, log *slog.Logger) (stop func(), err error) {
	options := []sdktrace.TracerProviderOption{sdktrace.WithSampler(sdktrace.NeverSample())}
	if exports() {
		if options, err = exporting(ctx, program); err != nil {
			return nil, err
		}
	}
	provider := sdktrace.NewTracerProvider(options...)
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Warn("telemetry", slog.Any("error", err)) }))
	otel.SetTextMapPropagator(propagation.TraceContext{})
	otel.SetTracerProvider(provider)
	return func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		if err := provider.Shutdown(ctx); err != nil && !errors.Is(err, context.DeadlineExceeded) {
			log.WarnContext(ctx, "telemetry", slog.Any("error", err))
		}
	}, nil
}

// exports reports whether the environment names a collector.
func exports() bool {
	return tracesVariable("ENDPOINT") != "" && os.Getenv("OTEL_TRACES_EXPORTER") != "none" &&
		!strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true")
}

// tracesVariable returns a setting of the exporter: the one for traces comes before the one for all signals.
func tracesVariable(name string) string {
	if value := os.Getenv("OTEL_EXPORTER_OTLP_TRACES_" + name); value != "" {
		return value
	}
	return os.Getenv("OTEL_EXPORTER_OTLP_" + name)
}

func exporting(ctx context.Context, program Program) ([]sdktrace.TracerProviderOption, error) {
	if protocol := tracesVariable("PROTOCOL"); protocol != "" && protocol != "http/protobuf" {
		return nil, fault.New(fault.Malformed, codeTraceSettings, "OTEL_EXPORTER_OTLP_PROTOCOL must be http/protobuf: "+
			"traces are sent by OTLP over HTTP.", nil)
	}
	spans, err := otlptracehttp.New(ctx)
	if err != nil {
		return nil, fmt.Errorf("trace exporter: %w", err)
	}
	who, err := resource.Merge(resource.NewSchemaless(
		attribute.String("service.name", program.Service),
		attribute.String("service.version", program.Version),
		attribute.String("service.instance.id", program.Instance),
	), resource.Environment())
	if err != nil {
		return nil, fmt.Errorf("trace resource: %w", err)
	}
	// The sampler is the one of OTEL_TRACES_SAMPLER; by default parentbased_always_on.
	return []sdktrace.TracerProviderOption{
		sdktrace.WithResource(who), sdktrace.WithSpanProcessor(own{sdktrace.NewBatchSpanProcessor(spans)}),
	}, nil
}

// own sends only the spans of this project's tracers: those of libraries name URLs and statements, which may hold
// secrets.
type own struct{ sdktrace.SpanProcessor }

func (o own) OnEnd(span sdktrace.ReadOnlySpan) {
	if strings.HasPrefix(span.InstrumentationScope().Name, ownTracers) {
		o.SpanProcessor.OnEnd(span)
	}
}

// Traceparent returns the span that ctx is in as the W3C's traceparent header; empty where it is in none.
func Traceparent(ctx context.Context) string {
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	return carrier[traceparent]
}

// Continue returns a context within the span that a traceparent header names. A header that names none changes nothing.
func Continue(ctx context.Context, header string) context.Context {
	return propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{traceparent: header})
}

// ContinueUnsampled is Continue for a caller whose word does not decide what is sent to the collector.
func ContinueUnsampled(ctx context.Context, header string) context.Context {
	ctx = Continue(ctx, header)
	sc := trace.SpanContextFromContext(ctx)
	if !sc.IsSampled() {
		return ctx
	}
	return trace.ContextWithRemoteSpanContext(ctx, sc.WithTraceFlags(sc.TraceFlags().WithSampled(false)))
}

// TraceID returns the id of the trace that a traceparent header names, in hex; empty for none.
func TraceID(header string) string {
	parts := strings.Split(header, "-")
	if len(parts) < 4 {
		return ""
	}
	id, err := trace.TraceIDFromHex(parts[1])
	if err != nil {
		return ""
	}
	return id.String()
}

// Within returns the traceparent header of a peer's span where it is part of the trace that asked names, else asked.
// Whether the trace is sent to the collector, asked alone says.
func Within(asked, peer string) string {
	id := TraceID(asked)
	if id == "" || TraceID(peer) != id {
		return asked
	}
	return peer[:len(peer)-2] + asked[len(asked)-2:]
}

// EndSpan ends a span. An error marks it with its code alone: its text may quote what must not leave this machine.
func EndSpan(span trace.Span, err error) {
	if err != nil && span.IsRecording() {
		span.SetStatus(codes.Error, string(fault.As(err).Code))
	}
	span.End()
}
