package telemetry_test

import (
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"maps"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel"

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

func TestALineHasTheFieldsOfItsWork(t *testing.T) {
	var out strings.Builder
	log, err := telemetry.NewLogger(&out, telemetry.LogConfig{})
	require.NoError(t, err)
	stop, err := telemetry.StartTraces(t.Context(), telemetry.Program{}, log)
	require.NoError(t, err)
	defer stop()
	ctx, span := otel.Tracer("gpuaas/test").Start(t.Context(), "work")
	require.False(t, span.IsRecording(), "no collector is configured")

	telemetry.SetFields(ctx, telemetry.Fields{OrgID: "nowhere"}) // outside of any work
	ctx = telemetry.WithFields(ctx, telemetry.Fields{CorrelationID: "request", OrgID: "caller's"})
	inner := telemetry.WithFields(ctx, telemetry.Fields{AppInstanceID: "other"})
	telemetry.SetFields(ctx, telemetry.Fields{
		OrgID: "org", ProjectID: "project", AppInstanceID: "instance", OperatingMode: "tenant_managed",
		ControlPlaneScope: "project", RuntimeBackend: "containerd",
	})
	log.InfoContext(ctx, "line", slog.String("more", "x"))
	log.InfoContext(inner, "line")
	log.Info("line")

	var lines []map[string]any
	for line := range strings.SplitSeq(strings.TrimSpace(out.String()), "\n") {
		fields := map[string]any{}
		require.NoError(t, json.Unmarshal([]byte(line), &fields))
		delete(fields, "time")
		lines = append(lines, fields)
	}
	common := map[string]any{"level": "INFO", "msg": "line"}
	ids := map[string]any{
		"trace_id": span.SpanContext().TraceID().String(), "span_id": span.SpanContext().SpanID().String(),
		"correlation_id": "request",
	}
	require.Equal(t, []map[string]any{
		merged(common, ids, map[string]any{
			"more": "x", "org_id": "org", "project_id": "project", "app_instance_id": "instance",
			"operating_mode": "tenant_managed", "control_plane_scope": "project", "runtime_backend": "containerd",
		}),
		merged(common, ids, map[string]any{"org_id": "caller's", "app_instance_id": "other"}),
		common,
	}, lines)
}

func merged(all ...map[string]any) map[string]any {
	out := map[string]any{}
	for _, m := range all {
		maps.Copy(out, m)
	}
	return out
}
