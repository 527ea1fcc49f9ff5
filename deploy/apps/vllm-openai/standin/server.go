package main

import (
	"crypto/subtle"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// version is what /version answers; a real server answers a plain number.
const version = "0.11.0+standin"

// maxRequestBytes bounds a request's body.
const maxRequestBytes = 4 << 20

type server struct {
	flags
	started time.Time

	registry         *prometheus.Registry
	running          prometheus.Gauge
	promptTokens     prometheus.Counter
	generationTokens prometheus.Counter
	succeeded        *prometheus.CounterVec
}

func newServer(f flags, now time.Time) *server {
	labels := prometheus.Labels{"model_name": f.servedNames[0], "engine": "0"}
	s := &server{
		flags: f, started: now, registry: prometheus.NewRegistry(),
		running: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "vllm:num_requests_running", Help: "Requests that run.", ConstLabels: labels,
		}),
		promptTokens: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "vllm:prompt_tokens_total", Help: "Tokens of prompts.", ConstLabels: labels,
		}),
		generationTokens: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "vllm:generation_tokens_total", Help: "Tokens of completions.", ConstLabels: labels,
		}),
		succeeded: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "vllm:request_success_total", Help: "Requests that were answered.", ConstLabels: labels,
		}, []string{"finished_reason"}),
	}
	waiting := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "vllm:num_requests_waiting", Help: "Requests that wait; always none here.", ConstLabels: labels,
	})
	cache := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "vllm:kv_cache_usage_perc", Help: "Share of the KV cache in use; always 0 here.", ConstLabels: labels,
	})
	s.registry.MustRegister(s.running, waiting, cache, s.promptTokens, s.generationTokens, s.succeeded)
	return s
}

func (s *server) handler() http.Handler {
	mux := http.NewServeMux()
	empty := func(http.ResponseWriter, *http.Request) {}
	mux.HandleFunc("GET /health", empty)
	mux.HandleFunc("GET /ping", empty)
	mux.HandleFunc("POST /ping", empty)
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]string{"version": version})
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("POST /tokenize", s.tokenize)
	mux.HandleFunc("GET /v1/models", s.models)
	mux.HandleFunc("POST /v1/completions", s.completions)
	mux.HandleFunc("POST /v1/chat/completions", s.chatCompletions)
	return s.authenticated(mux)
}

// authenticated asks for a key below /v1 alone, as vLLM does.
func (s *server) authenticated(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if len(s.apiKeys) > 0 && strings.HasPrefix(r.URL.Path, "/v1/") && !s.knows(r.Header.Get("Authorization")) {
			writeJSON(w, http.StatusUnauthorized, map[string]string{"error": "Unauthorized"})
			return
		}
		r.Body = http.MaxBytesReader(w, r.Body, maxRequestBytes)
		next.ServeHTTP(w, r)
	})
}

func (s *server) knows(authorization string) bool {
	key, bearer := strings.CutPrefix(authorization, "Bearer ")
	return bearer && slices.ContainsFunc(s.apiKeys, func(k string) bool {
		return subtle.ConstantTimeCompare([]byte(k), []byte(key)) == 1
	})
}

func (s *server) models(w http.ResponseWriter, _ *http.Request) {
	type model struct {
		ID          string `json:"id"`
		Object      string `json:"object"`
		Created     int64  `json:"created"`
		OwnedBy     string `json:"owned_by"`
		Root        string `json:"root"`
		MaxModelLen int    `json:"max_model_len"`
	}
	list := struct {
		Object string  `json:"object"`
		Data   []model `json:"data"`
	}{Object: "list"}
	for _, name := range s.servedNames {
		list.Data = append(list.Data, model{name, "model", s.started.Unix(), "vllm", s.model, s.maxModelLen})
	}
	writeJSON(w, http.StatusOK, list)
}
