package main

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestMetricsAreAddedUpOverTheirLabels(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="a"} 2
# TYPE vllm:request_success_total counter
vllm:request_success_total{model_name="a",finished_reason="stop"} 3
vllm:request_success_total{model_name="a",finished_reason="length"} 4
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{model_name="a"} 50
`))
	}))
	defer s.Close()
	got, err := read(t.Context(), s.URL, time.Unix(0, 0))
	require.NoError(t, err)
	require.Equal(t, Summary{
		Up: true, ReadAt: "1970-01-01T00:00:00Z", Running: 2, Succeeded: 7, PromptTokens: 50,
	}, got)
}

func TestAServerThatIsAwayIsNotUp(t *testing.T) {
	s := httptest.NewServer(http.NotFoundHandler())
	defer s.Close()
	got, err := read(t.Context(), s.URL, time.Unix(0, 0))
	require.ErrorContains(t, err, "404")
	require.False(t, got.Up)
}

func TestTheConfigSaysHowOftenTheMetricsAreRead(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.json")
	for text, want := range map[string]time.Duration{
		`{"read_every_seconds": 1.5}`: 1500 * time.Millisecond, `{}`: readEvery, `{"read_every_seconds": -1}`: readEvery,
		`{`: readEvery,
	} {
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		require.Equal(t, want, pause(file), text)
	}
	require.Equal(t, readEvery, pause(""), "there is no config")
}

func TestTheSummaryIsServed(t *testing.T) {
	var last atomic.Pointer[Summary]
	last.Store(&Summary{Up: true, PromptTokens: 9})
	w := httptest.NewRecorder()
	handler(&last).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
	require.Equal(t, http.StatusOK, w.Code)
	require.Contains(t, w.Body.String(), `"prompt_tokens":9`)
}
