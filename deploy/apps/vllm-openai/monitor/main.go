// Command monitor is the sidecar of the vLLM app: it reads the server's metrics every few seconds, by the name of its
// service, and serves their sums as JSON. It needs no model and no GPU, and works beside vLLM as beside its stand-in.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

const (
	// readEvery is the time between two reads of the metrics where the config does not say, readTimeout bounds one.
	readEvery   = 5 * time.Second
	readTimeout = 3 * time.Second
	// maxMetricsBytes bounds what one read takes.
	maxMetricsBytes = 8 << 20
	drainTime       = 3 * time.Second
)

// Summary is what the sidecar says of the server, as of its last read.
type Summary struct {
	Up               bool    `json:"up"`
	ReadAt           string  `json:"read_at,omitempty"`
	Running          float64 `json:"requests_running"`
	Waiting          float64 `json:"requests_waiting"`
	Succeeded        float64 `json:"requests_succeeded"`
	PromptTokens     float64 `json:"prompt_tokens"`
	GenerationTokens float64 `json:"generation_tokens"`
	ReadEverySeconds float64 `json:"read_every_seconds"`
}

// config is the instance's config. The file is replaced while the monitor runs, which reads it anew each time.
type config struct {
	ReadEverySeconds float64 `json:"read_every_seconds"`
}

// pause is the time until the next read of the metrics.
func pause(configFile string) time.Duration {
	var c config
	if text, err := os.ReadFile(configFile); err == nil && json.Unmarshal(text, &c) == nil && c.ReadEverySeconds > 0 {
		return time.Duration(c.ReadEverySeconds * float64(time.Second))
	}
	return readEvery
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	slog.SetDefault(slog.New(slog.NewJSONHandler(os.Stdout, nil)))
	if err := run(ctx, os.Getenv("METRICS_URL"), os.Getenv("ADDR"), os.Getenv("GPUAAS_CONFIG_FILE")); err != nil {
		slog.Error("monitor", "error", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, metricsURL, addr, configFile string) error {
	if metricsURL == "" || addr == "" {
		return errors.New("METRICS_URL and ADDR must be set")
	}
	var last atomic.Pointer[Summary]
	last.Store(&Summary{})
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: handler(&last), ReadHeaderTimeout: 5 * time.Second}
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	slog.Info("listening", "addr", listener.Addr().String(), "metrics", metricsURL)
	for {
		s, err := read(ctx, metricsURL, time.Now())
		if err != nil {
			slog.Warn("the server's metrics cannot be read", "error", err)
		}
		next := pause(configFile)
		s.ReadEverySeconds = next.Seconds()
		last.Store(&s)
		select {
		case err := <-done:
			return err
		case <-ctx.Done():
			drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
			defer cancel()
			return server.Shutdown(drain)
		case <-time.After(next):
		}
	}
}

func handler(last *atomic.Pointer[Summary]) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(last.Load())
	})
	return mux
}

// read returns a summary that is not up where the metrics cannot be read.
func read(ctx context.Context, url string, now time.Time) (Summary, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return Summary{}, err
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return Summary{}, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return Summary{}, fmt.Errorf("the server answers %s", resp.Status)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(io.LimitReader(resp.Body, maxMetricsBytes))
	if err != nil {
		return Summary{}, err
	}
	return Summary{
		Up: true, ReadAt: now.UTC().Format(time.RFC3339),
		Running:          sum(families["vllm:num_requests_running"]),
		Waiting:          sum(families["vllm:num_requests_waiting"]),
		Succeeded:        sum(families["vllm:request_success_total"]),
		PromptTokens:     sum(families["vllm:prompt_tokens_total"]),
		GenerationTokens: sum(families["vllm:generation_tokens_total"]),
	}, nil
}

// sum adds up the gauges and counters of a family, over all its labels.
func sum(f *dto.MetricFamily) (total float64) {
	for _, m := range f.GetMetric() {
		total += m.GetGauge().GetValue() + m.GetCounter().GetValue()
	}
	return total
}
