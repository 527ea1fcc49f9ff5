package telemetry_test

import (
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/gpuaas/gpuaas/pkg/telemetry"
)

const hush = "HUSH-HUSH"

type login struct {
	User     string `json:"user"`
	Password string `json:"password"`
}

type telling struct{}

func (telling) LogValue() slog.Value {
	return slog.GroupValue(slog.String("name", "n"), slog.String("private_key", hush))
}

func TestLogHoldsNoSecret(t *testing.T) {
	for _, format := range []string{"json", "text"} {
		var out strings.Builder
		log, err := telemetry.NewLogger(&out, telemetry.LogConfig{Format: format})
		require.NoError(t, err)
		log = log.With("passphrase", hush).WithGroup("request")
		log.Info("bearer "+hush+" came", "password", hush, slog.Group("inner", "api_key", hush),
			"body", map[string]any{"token": hush, "list": []any{map[string]any{"secret": hush}}}, "login", login{"ann", hush},
			"login2", &login{"bob", hush},
			"telling", telling{}, "raw", []byte(hush),
			"error", errors.New("dial postgres://hub:"+hush+"@db/x failed: Authorization: Bearer "+hush),
			"text", "gpuaas-join-"+hush+" gpuaas_ut_"+hush+" whsec_"+hush+" eyJhbGciOiJ.eyJzdWIiOiJ."+hush+
				" -----BEGIN PRIVATE KEY-----\n"+hush+"\n-----END PRIVATE KEY----- end",
			"cut", "-----BEGIN PRIVATE KEY-----\n"+hush)
		require.NotContains(t, out.String(), hush)
		for _, kept := range []string{"ann", "bob", "postgres://hub:", "@db/x failed", "end", "9 bytes"} {
			require.Contains(t, out.String(), kept)
		}
	}
}

func TestSecretKeys(t *testing.T) {
	for _, key := range []string{
		"password", "X-Api-Key", "private_key_pem", "privateKeyPem", "access_token", "token",
		"Authorization", "Set-Cookie", "join_token", "client_secret", "credentials", "passphrase_file",
	} {
		require.True(t, telemetry.IsSecretKey(key), key)
	}
	for _, key := range []string{
		"token_type", "tokens", "key_id", "public_key", "expires_at", "slug", "correlation_id",
		"tokens_per_second", "user_token_id",
	} {
		require.False(t, telemetry.IsSecretKey(key), key)
	}
}

func TestLogSettingsAreChecked(t *testing.T) {
	for _, bad := range []telemetry.LogConfig{{Format: "xml"}, {Level: "loud"}} {
		_, err := telemetry.NewLogger(io.Discard, bad)
		require.ErrorContains(t, err, "want")
	}
	var out strings.Builder
	log, err := telemetry.NewLogger(&out, telemetry.LogConfig{Level: "warn"})
	require.NoError(t, err)
	log.Info("quiet")
	require.Empty(t, out.String())
}

func TestMetricsAreScrapedAndTracesHaveIDs(t *testing.T) {
	tel, err := telemetry.Start(t.Context(), telemetry.Config{Service: "gpuaas-hub", Version: "v0", Instance: "i"})
	require.NoError(t, err)
	defer func() { require.NoError(t, tel.Close(t.Context())) }()

	counter, err := otel.Meter("test").Int64Counter("things")
	require.NoError(t, err)
	for i := range 3000 {
		counter.Add(t.Context(), 1, metric.WithAttributes(attribute.Int("i", i)))
	}
	w := httptest.NewRecorder()
	tel.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", http.NoBody))
	require.Equal(t, http.StatusOK, w.Code)
	require.Contains(t, w.Body.String(), "things_total{")
	require.Contains(t, w.Body.String(), "go_goroutines")
	require.LessOrEqual(t, strings.Count(w.Body.String(), "things_total{"), 1000, "label sets are bounded")

	ctx, span := otel.Tracer("test").Start(t.Context(), "work")
	require.True(t, span.SpanContext().TraceID().IsValid())
	var out strings.Builder
	log, err := telemetry.NewLogger(&out, telemetry.LogConfig{})
	require.NoError(t, err)
	log.InfoContext(ctx, "inside")
	require.Contains(t, out.String(), span.SpanContext().TraceID().String())
	span.End()
}

func TestTracesGoToTheCollector(t *testing.T) {
	got := make(chan string, 1)
	collector := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		select {
		case got <- r.URL.Path:
		default:
		}
	}))
	defer collector.Close()
	tel, err := telemetry.Start(t.Context(), telemetry.Config{
		Service: "gpuaas-hub", OTLPEndpoint: collector.URL,
		SampleRatio: 1,
	})
	require.NoError(t, err)
	_, span := otel.Tracer("test").Start(t.Context(), "work")
	span.End()
	require.NoError(t, tel.Close(t.Context()))
	require.Contains(t, <-got, "/v1/traces")
}

func TestACallersTraceparentDoesNotDecideWhatIsSampled(t *testing.T) {
	tel, err := telemetry.Start(t.Context(), telemetry.Config{
		Service: "gpuaas-hub", OTLPEndpoint: "http://127.0.0.1:1",
		SampleRatio: 0,
	})
	require.NoError(t, err)
	remote := trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: trace.TraceID{1}, SpanID: trace.SpanID{1},
		TraceFlags: trace.FlagsSampled, Remote: true,
	})
	_, span := otel.Tracer("test").Start(trace.ContextWithRemoteSpanContext(t.Context(), remote), "work")
	require.Equal(t, remote.TraceID(), span.SpanContext().TraceID())
	require.False(t, span.SpanContext().IsSampled())
	span.End()
	require.NoError(t, tel.Close(t.Context()))
}
