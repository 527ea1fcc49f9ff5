package httpapi

import (
	"encoding/json"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/pkg/telemetry/telemetrytest"
)

// jsonLog is a logger as the hub's.
func jsonLog(t *testing.T, w io.Writer) *slog.Logger {
	t.Helper()
	log, err := telemetry.NewLogger(w, telemetry.LogConfig{})
	require.NoError(t, err)
	return log
}

// startTraces sends the spans of a test to a collector until stop.
func startTraces(t *testing.T) (collector *telemetrytest.Collector, stop func()) {
	t.Helper()
	collector = telemetrytest.NewCollector(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
	stop, err := telemetry.StartTraces(t.Context(), telemetry.Program{}, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	return collector, stop
}

// lines are the log lines about a request.
func lines(t *testing.T, text, correlationID string) (found []map[string]any) {
	t.Helper()
	for line := range strings.Lines(text) {
		fields := map[string]any{}
		require.NoError(t, json.Unmarshal([]byte(line), &fields), line)
		if fields["correlation_id"] == correlationID {
			found = append(found, fields)
		}
	}
	return found
}

const (
	traceID = "0af7651916cd43dd8448eb211c80319c"
	sampled = "00-" + traceID + "-b7ad6b7169203331-01"
)

func TestTheLogLineOfARequestHasTheFieldsThatApply(t *testing.T) {
	_, stop := startTraces(t)
	defer stop()
	s := &theater{house: newHouse(t)}
	orgID, projectID, boss := s.tenant(t, "acme")
	s.open(t)
	allocation := s.must(t, boss, "POST", "/projects/"+projectID+"/allocations", "k1", sliceBody, 201).text("id")
	i := s.instance(t, orgID, projectID, allocation)
	ask := func(correlationID, token, path string) map[string]any {
		r := httptest.NewRequest(http.MethodGet, "/api/v1"+path, http.NoBody)
		r.Header.Set("Authorization", "Bearer "+token)
		r.Header.Set("X-Request-ID", correlationID)
		r.Header.Set("traceparent", sampled)
		s.ServeHTTP(httptest.NewRecorder(), r)
		all := lines(t, s.log.String(), correlationID)
		require.NotEmpty(t, all)
		last := all[len(all)-1]
		require.Equal(t, "request", last["msg"])
		require.Equal(t, traceID, last["trace_id"])
		return last
	}
	names := []string{
		"correlation_id", "trace_id", "org_id", "project_id", "app_instance_id", "operating_mode", "control_plane_scope",
		"runtime_backend",
	}
	of := func(line map[string]any) map[string]any {
		maps.DeleteFunc(line, func(name string, _ any) bool { return !slices.Contains(names, name) })
		return line
	}
	project := "/projects/" + projectID
	require.Equal(t, map[string]any{
		"correlation_id": "instance", "trace_id": traceID, "org_id": orgID, "project_id": projectID, "app_instance_id": i.ID,
		"operating_mode": "tenant_dedicated", "control_plane_scope": "project", "runtime_backend": "launchable_oci",
	}, of(ask("instance", boss, project+"/app-instances/"+i.ID)))
	require.Equal(t, map[string]any{
		"correlation_id": "project", "trace_id": traceID, "org_id": orgID, "project_id": projectID,
	}, of(ask("project", boss, project+"/app-instances")))
	require.Equal(t, map[string]any{"correlation_id": "org", "trace_id": traceID, "org_id": orgID},
		of(ask("org", boss, "/projects")))
	require.Equal(t, map[string]any{"correlation_id": "nobody", "trace_id": traceID, "project_id": projectID},
		of(ask("nobody", "wrong", project)), "the project of the path, for every caller")
	require.Equal(t, map[string]any{"correlation_id": "nothing", "trace_id": traceID},
		of(ask("nothing", "wrong", "/projects/no-id")))
}

func TestACallerMayHaveSomeOfItsRequestsTraced(t *testing.T) {
	collector, stop := startTraces(t)
	t.Setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
	t.Setenv("OTEL_TRACES_SAMPLER_ARG", "0")
	stop()
	stop, err := telemetry.StartTraces(t.Context(), telemetry.Program{}, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	d := newTestAPI(t, stubServer{})
	ask := func(traceparent string) {
		r := httptest.NewRequest(http.MethodGet, "/healthz", http.NoBody)
		r.Header.Set("traceparent", traceparent)
		d.ServeHTTP(httptest.NewRecorder(), r)
	}
	ask("")
	ask(strings.TrimSuffix(sampled, "1") + "0")
	for range 3 * addressTracesBurst {
		ask(sampled)
	}
	stop()
	spans := collector.Spans()
	require.Len(t, spans, addressTracesBurst, "the test's clock stands still")
	require.Equal(t, traceID, spans[0].Trace())
	require.Equal(t, "b7ad6b7169203331", spans[0].Parent())
}
