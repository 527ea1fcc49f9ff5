package httpapi

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/idempotency"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/internal/query"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	goodToken = "good-token"
	someID    = "0192f0c0-0000-7000-8000-000000000001"
)

// testAPI is a handler under test with what it wrote down.
type testAPI struct {
	http.Handler
	mu     sync.Mutex
	audits []command.Failure
	metas  []command.Meta
	log    strings.Builder
	now    time.Time
	// known are credentials beside goodToken; lookups counts the calls of Authenticate.
	known   map[string]iam.Principal
	lookups int
}

func (d *testAPI) Authenticate(_ context.Context, bearer string, _ time.Time) (iam.Principal, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lookups++
	if p, ok := d.known[bearer]; ok {
		return p, nil
	}
	if bearer != goodToken {
		return iam.Principal{}, fault.New(fault.Unauthenticated, "token_invalid", "The token does not count.", nil)
	}
	return iam.Principal{Type: principal.User, ID: someID, OrgID: someID}, nil
}

func (d *testAPI) AuditFailure(_ context.Context, m command.Meta, f command.Failure) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.audits = append(d.audits, f)
	d.metas = append(d.metas, m)
	return nil
}

func (d *testAPI) Write(p []byte) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.log.Write(p)
}

func (d *testAPI) text() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.log.String()
}

func newTestAPI(t *testing.T, s StrictServerInterface, change ...func(*Config)) *testAPI {
	t.Helper()
	d := &testAPI{now: time.Unix(1_800_000_000, 0).UTC()}
	conf := Config{
		Authenticator: d, Auditor: d, Log: jsonLog(t, d), Now: func() time.Time { return d.now },
		RequestsPerSecond: 1e6, Burst: 1e6,
	}
	for _, f := range change {
		f(&conf)
	}
	h, err := NewHandler(s, conf)
	require.NoError(t, err)
	d.Handler = h
	return d
}

// serverOn is a server whose commands and queries work on the database; keys may be nil.
func serverOn(d *db.DB, sealer idempotency.Sealer, keys *trust.Keys) *Server {
	bundle := func() protocol.Bundle { return protocol.Bundle{} }
	if keys != nil {
		bundle = keys.Bundle
	}
	return &Server{
		Commands: &command.Service{
			DB:             d,
			Sealer:         sealer,
			Keys:           keys,
			Bundle:         bundle,
			LeaseDuration:  time.Hour,
			CertificateTTL: time.Hour,
		},
		Queries: &query.Service{
			DB: d, Tail: event.NewTail(d), Cache: query.NewInstanceCache(d),
			Generations: func(_ context.Context, _ db.Tx, ids ...string) (map[string]uint64, error) {
				one := map[string]uint64{}
				for _, id := range ids {
					one[id] = 1
				}
				return one, nil
			},
		},
		Keys: keys,
	}
}

// ask is one request; zero fields mean a well-formed one.
type ask struct {
	method, path, body string
	header             http.Header
	// address of the caller; empty is httptest's own.
	address string
}

func (d *testAPI) do(t *testing.T, a ask) *http.Response {
	t.Helper()
	var body io.Reader = http.NoBody
	if a.body != "" {
		body = strings.NewReader(a.body)
	}
	r := httptest.NewRequest(a.method, a.path, body)
	r.Header.Set("Authorization", "Bearer "+goodToken)
	r.Header.Set("X-Idempotency-Key", "key-1")
	r.Header.Set("X-Request-ID", "req-1")
	if a.body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	for name, values := range a.header {
		r.Header.Del(name)
		for _, v := range values {
			r.Header.Add(name, v)
		}
	}
	if a.address != "" {
		r.RemoteAddr = net.JoinHostPort(a.address, "1")
	}
	w := httptest.NewRecorder()
	d.ServeHTTP(w, r)
	return w.Result()
}

// problem asserts that the answer is a well-made problem document and gives it.
func problem(t *testing.T, res *http.Response, status int) Problem {
	t.Helper()
	text, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
	require.Equal(t, status, res.StatusCode, string(text))
	require.Equal(t, "application/problem+json", res.Header.Get("Content-Type"))
	var p Problem
	d := json.NewDecoder(strings.NewReader(string(text)))
	d.DisallowUnknownFields()
	require.NoError(t, d.Decode(&p), string(text))
	require.EqualValues(t, status, p.Status)
	require.Equal(t, problemType+p.Code, p.Type)
	require.NotEmpty(t, p.Code)
	require.NotEmpty(t, p.Title)
	require.NotEmpty(t, p.Detail)
	require.Equal(t, res.Header.Get("X-Request-ID"), p.CorrelationID)
	return p
}

// steps is a clock that advances with every reading, so that a test of many requests is never over its rate.
func steps(start time.Time, by time.Duration) func() time.Time {
	var mu sync.Mutex
	now := start
	return func() time.Time {
		mu.Lock()
		defer mu.Unlock()
		now = now.Add(by)
		return now
	}
}
