package metrics_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/gpuaas/gpuaas/pkg/telemetry/metrics"
)

func TestMetricsAreScraped(t *testing.T) {
	m, err := metrics.Start()
	require.NoError(t, err)
	defer func() { require.NoError(t, m.Close(t.Context())) }()

	counter, err := otel.Meter("test").Int64Counter("things")
	require.NoError(t, err)
	for i := range 3000 {
		counter.Add(t.Context(), 1, metric.WithAttributes(attribute.Int("i", i)))
	}
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", http.NoBody))
	require.Equal(t, http.StatusOK, w.Code)
	require.Contains(t, w.Body.String(), "things_total{")
	require.Contains(t, w.Body.String(), "go_goroutines")
	require.LessOrEqual(t, strings.Count(w.Body.String(), "things_total{"), 1000, "label sets are bounded")
}
