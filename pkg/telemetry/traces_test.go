package telemetry_test

import (
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/pkg/telemetry/telemetrytest"
)

const endpointVariable = "OTEL_EXPORTER_OTLP_ENDPOINT"

func start(t *testing.T) (stop func()) {
	t.Helper()
	stop, err := telemetry.StartTraces(t.Context(), telemetry.Program{
		Service: "gpuaas-hub", Version: "v0", Instance: "i",
	}, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	return stop
}

func TestSpansGoToTheCollectorOfTheEnvironment(t *testing.T) {
	collector := telemetrytest.NewCollector(t)
	t.Setenv(endpointVariable, collector.URL)
	stop := start(t)
	ctx, span := otel.Tracer("gpuaas/test").Start(t.Context(), "work")
	header := telemetry.Traceparent(ctx)
	_, part := otel.Tracer("gpuaas/test").Start(telemetry.Continue(t.Context(), header), "part")
	telemetry.EndSpan(part, errors.New("the password is "+hush))
	span.End()
	_, foreign := span.TracerProvider().Tracer("github.com/some/library").Start(ctx, "GET https://host/?signature="+hush)
	foreign.End()
	stop()

	spans := collector.Spans()
	require.Len(t, spans, 2)
	require.Equal(t, []string{"part", "work"}, []string{spans[0].Name, spans[1].Name})
	require.Equal(t, "gpuaas-hub", spans[0].Service)
	require.Equal(t, spans[1].Trace(), spans[0].Trace())
	require.Equal(t, spans[1].ID(), spans[0].Parent())
	require.Equal(t, telemetry.TraceID(header), spans[0].Trace())
	require.NotContains(t, collector.Text(t), hush)
	require.EqualValues(t, codes.Error+1, spans[0].Status.Code) // OTLP counts otherwise
}

func TestTheEnvironmentSaysWhatIsSampled(t *testing.T) {
	t.Setenv(endpointVariable, telemetrytest.NewCollector(t).URL)
	sampled := func() bool {
		defer start(t)()
		_, span := otel.Tracer("gpuaas/test").Start(t.Context(), "work")
		defer span.End()
		return span.SpanContext().IsSampled()
	}
	require.True(t, sampled())
	t.Setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
	t.Setenv("OTEL_TRACES_SAMPLER_ARG", "0")
	require.False(t, sampled())
	t.Setenv("OTEL_TRACES_SAMPLER", "always_on")
	require.True(t, sampled())
	t.Setenv("OTEL_SDK_DISABLED", "true")
	require.False(t, sampled())
	t.Setenv("OTEL_SDK_DISABLED", "")
	t.Setenv("OTEL_TRACES_EXPORTER", "none")
	require.False(t, sampled())
	t.Setenv("OTEL_TRACES_EXPORTER", "")
	t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
	_, err := telemetry.StartTraces(t.Context(), telemetry.Program{}, slog.New(slog.DiscardHandler))
	require.ErrorContains(t, err, "http/protobuf")
}

func TestTracesGoOnWithoutACollector(t *testing.T) {
	defer start(t)()
	ctx, span := otel.Tracer("gpuaas/test").Start(telemetry.Continue(t.Context(), "not a header"), "work")
	require.False(t, span.IsRecording())
	header := telemetry.Traceparent(ctx)
	require.Len(t, header, 55)
	require.Equal(t, header, telemetry.Within(header, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"))
	require.Equal(t, header, telemetry.Within(header, "nonsense"))
	require.Empty(t, telemetry.Within("", header))
	peer := header[:36] + "b7ad6b7169203331-0"
	require.Equal(t, peer+"0", telemetry.Within(header, peer+"1"), "a peer does not decide what is sent")

	const sampled = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	require.Equal(t, sampled, telemetry.Traceparent(telemetry.Continue(t.Context(), sampled)))
	sc := trace.SpanContextFromContext(telemetry.ContinueUnsampled(t.Context(), sampled))
	require.Equal(t, telemetry.TraceID(sampled), sc.TraceID().String())
	require.False(t, sc.IsSampled())
	require.True(t, sc.IsRemote())
}

func TestACollectorThatHangsHoldsNobodyUp(t *testing.T) {
	asked, release := make(chan struct{}, 1), make(chan struct{})
	hanging := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		select {
		case asked <- struct{}{}:
		default:
		}
		<-release
	}))
	defer hanging.Close()
	defer close(release)
	t.Setenv(endpointVariable, hanging.URL)
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
	stop := start(t)
	tracer := otel.Tracer("gpuaas/test")
	_, span := tracer.Start(t.Context(), "first")
	span.End()
	<-asked
	for range 100_000 { // many times what is queued: the rest is dropped
		_, span := tracer.Start(t.Context(), "work")
		span.End()
	}
	stop() // returns although nothing was ever answered
}
