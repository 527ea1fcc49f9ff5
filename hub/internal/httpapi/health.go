package httpapi

import (
	"bytes"
	"context"
	"sync"
	"time"

	hubapi "github.com/gpuaas/gpuaas/hub/api"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// GetHealth says that the process answers.
func (s *Server) GetHealth(context.Context, GetHealthRequestObject) (GetHealthResponseObject, error) {
	return GetHealth200JSONResponse{Status: HealthStatusOk, Version: s.Version}, nil
}

const (
	// readinessTime is how long an answer about readiness is given again: a flood of probes asks the database once.
	readinessTime = time.Second
	// readinessTimeout bounds the question; a database that takes longer is not ready.
	readinessTimeout = 2 * time.Second
)

// readiness caches the last answer.
type readiness struct {
	mu    sync.Mutex
	until time.Time
	err   error
}

func (r *readiness) check(ctx context.Context, ask func(context.Context) error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now := callOf(ctx).at; !now.Before(r.until) {
		// The answer is for all who ask: one caller who hangs up must not make the hub unready.
		asking, cancel := context.WithTimeout(context.WithoutCancel(ctx), readinessTimeout)
		defer cancel()
		r.err, r.until = ask(asking), now.Add(readinessTime)
	}
	return r.err
}

// GetReadiness says whether requests would succeed now.
func (s *Server) GetReadiness(ctx context.Context, _ GetReadinessRequestObject) (GetReadinessResponseObject, error) {
	if s.Ready != nil {
		if err := s.readiness.check(ctx, s.Ready); err != nil {
			return nil, fault.New(fault.Unavailable, codeNotReady, "The hub cannot serve now; its log says why.", err)
		}
	}
	return GetReadiness200JSONResponse{Status: HealthStatusOk, Version: s.Version}, nil
}

// GetOpenAPI gives the contract as it was written.
func (s *Server) GetOpenAPI(context.Context, GetOpenAPIRequestObject) (GetOpenAPIResponseObject, error) {
	return GetOpenAPI200ApplicationYamlResponse{
		Body:          bytes.NewReader(hubapi.OpenAPI),
		ContentLength: int64(len(hubapi.OpenAPI)),
	}, nil
}
