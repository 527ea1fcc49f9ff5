package command_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
	"github.com/gpuaas/gpuaas/hub/internal/webhook"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
)

// Law 11: a token that the hub gives out is redacted wherever the text of a log line quotes it.
func TestLaw11TokensOfEveryKindAreRedactedInALogLine(t *testing.T) {
	session := iam.NewSessionTokens("", "", time.Now())
	join, err := fleet.NewJoinSecret()
	require.NoError(t, err)
	for kind, token := range map[string]string{
		"user":       iam.NewUserToken(),
		"access":     session.Access,
		"refresh":    session.Refresh,
		"invitation": iam.NewInvitationToken(),
		"wrapping":   secret.NewToken(),
		"webhook":    webhook.NewSecret(),
		"join":       join,
	} {
		var out bytes.Buffer
		log, err := telemetry.NewLogger(&out, telemetry.LogConfig{})
		require.NoError(t, err)
		log.Error("refused", slog.Any("error", fmt.Errorf("no such token: %s", token)))
		require.NotContains(t, out.String(), token[len(token)-20:], kind)
		require.Contains(t, out.String(), "no such token: "+telemetry.Redacted, kind)
	}
}
