package uplink

import (
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/pkg/telemetry/telemetrytest"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestAStatusIsTracedWhenItIsNewToTheHub(t *testing.T) {
	const asked = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	collector := telemetrytest.NewCollector(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
	stop, err := telemetry.StartTraces(t.Context(), telemetry.Program{}, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	observed := []*protocol.WorkloadStatus{
		{MemberId: "a", Revision: 1, Status: protocol.WorkloadStatus_STARTING, Traceparent: asked},
		{MemberId: "untraced", Revision: 1, Status: protocol.WorkloadStatus_READY},
	}
	s := &session{}
	send := func() []*protocol.WorkloadStatus {
		sent := append([]*protocol.WorkloadStatus{}, observed...)
		s.traceStatuses(t.Context(), sent)(nil)
		return sent
	}
	first := send()
	again := send()
	observed[0] = proto.CloneOf(observed[0])
	observed[0].Status = protocol.WorkloadStatus_READY
	ready := send()
	stop()

	spans := collector.Spans()
	require.Len(t, spans, 2)
	require.Equal(t, "report starting", spans[0].Name)
	require.Equal(t, "report ready", spans[1].Name)
	for n, status := range []*protocol.WorkloadStatus{first[0], ready[0]} {
		require.Equal(t, "b7ad6b7169203331", spans[n].Parent())
		require.Equal(t, "00-"+spans[n].Trace()+"-"+spans[n].ID()+"-01", status.GetTraceparent())
	}
	require.Equal(t, asked, again[0].GetTraceparent(), "nothing new")
	require.Equal(t, asked, observed[0].GetTraceparent(), "what others read is unchanged")
	require.Empty(t, ready[1].GetTraceparent())
}

// An older hub sends no traceparent; a span without a parent would begin a trace of its own.
func TestWhatAHubSendsWithoutATraceBeginsNone(t *testing.T) {
	collector := telemetrytest.NewCollector(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
	stop, err := telemetry.StartTraces(t.Context(), telemetry.Program{}, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	for _, traceparent := range []string{"", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"} {
		_, end := traced(t.Context(), traceparent, "accept state")
		end(nil)
	}
	stop()
	spans := collector.Spans()
	require.Len(t, spans, 1)
	require.Equal(t, "b7ad6b7169203331", spans[0].Parent())
}
