package nodes

import (
	"encoding/json"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/pkg/telemetry/telemetrytest"
	"github.com/gpuaas/gpuaas/protocol"
)

// The operation of an instance was asked for in a trace that is sent to the collector, or in one that is not.
func TestANodeDoesNotChooseTheTraceOfItsReport(t *testing.T) {
	const (
		asked    = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
		unsent   = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
		followed = "00-0af7651916cd43dd8448eb211c80319c-00000000000000aa-01"
		foreign  = "00-11111111111111111111111111111111-00000000000000bb-01"
	)
	for name, c := range map[string]struct{ asked, reported, parent string }{
		"follows the operation":         {asked, followed, "00000000000000aa"},
		"another trace":                 {asked, foreign, "b7ad6b7169203331"},
		"an agent that knows no traces": {asked, "", "b7ad6b7169203331"},
		"nonsense":                      {asked, "nonsense", "b7ad6b7169203331"},
		"the hub sends nothing of it":   {unsent, followed, ""},
		"the operation was in no trace": {"", foreign, ""},
	} {
		t.Run(name, func(t *testing.T) {
			collector := telemetrytest.NewCollector(t)
			t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
			stop, err := telemetry.StartTraces(t.Context(), telemetry.Program{}, slog.New(slog.DiscardHandler))
			require.NoError(t, err)
			var out strings.Builder
			log, err := telemetry.NewLogger(&out, telemetry.LogConfig{})
			require.NoError(t, err)
			svc := &Service{Config: Config{Log: log}}
			svc.traceChanges(t.Context(), reportResult{
				report: Report{Report: instance.Report{NodeID: "n", Statuses: []*protocol.WorkloadStatus{
					{InstanceId: "other", Traceparent: foreign}, {InstanceId: "i", Traceparent: c.reported},
				}}},
				changes: []instance.Change{{
					Instance: instance.Instance{
						ID: "i", OrgID: "o", ProjectID: "p", Operation: instance.Operation{CorrelationID: "c", Traceparent: c.asked},
					},
					Steps: []lifecycle.Step{{From: lifecycle.Deploying, To: lifecycle.Running}},
				}},
			}, time.Now())
			stop()
			spans := collector.Spans()
			line := map[string]any{}
			require.NoError(t, json.Unmarshal([]byte(out.String()), &line))
			require.Equal(t, "c", line["correlation_id"])
			require.Equal(t, "i", line["app_instance_id"])
			if c.parent == "" {
				require.Empty(t, spans)
				return
			}
			require.Len(t, spans, 1)
			require.Equal(t, "accept running", spans[0].Name)
			require.Equal(t, telemetry.TraceID(asked), spans[0].Trace())
			require.Equal(t, c.parent, spans[0].Parent())
			require.Equal(t, telemetry.TraceID(asked), line["trace_id"])
			require.Equal(t, "i", spans[0].Attribute("gpuaas.app_instance_id"))
		})
	}
}
