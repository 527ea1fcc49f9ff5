package cli

import (
	"encoding/json"
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/client"
)

// A push that is repeated with its idempotency key leaves one intent, and pushes also once its credentials have ended.
func TestARepeatedPushAsksForTheSameIntent(t *testing.T) {
	var keys []string
	ends := time.Now().Add(time.Hour)
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		keys = append(keys, r.Header.Get("X-Idempotency-Key"))
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(client.PublishIntent{Credentials: client.RegistryCredentials{ExpiresAt: ends}})
	}))
	defer server.Close()
	hub, err := client.Open(client.Config{
		URL: server.URL, CAPEM: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}),
	})
	require.NoError(t, err)
	defer hub.Close()
	s := &session{app: &app{key: "once"}, hub: hub}
	ask := func() {
		_, err := s.publishIntent(t.Context(), "0192f0c0-0000-7000-8000-00000000000b", client.PublishIntentCreate{})
		require.NoError(t, err)
	}
	ask()
	require.Equal(t, []string{"once"}, keys)
	ends = time.Now().Add(-time.Minute)
	ask()
	require.Len(t, keys, 3)
	require.Equal(t, "once", keys[1])
	require.NotEqual(t, "once", keys[2])
}
