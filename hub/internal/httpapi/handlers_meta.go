package httpapi

import (
	"bytes"
	"context"

	hubapi "github.com/gpuaas/gpuaas/hub/api"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// GetHealth says that the process answers.
func (s *Server) GetHealth(context.Context, GetHealthRequestObject) (GetHealthResponseObject, error) {
	return GetHealth200JSONResponse{Status: HealthStatusOk, Version: s.Version}, nil
}

// GetReadiness says whether requests would succeed now.
func (s *Server) GetReadiness(ctx context.Context, _ GetReadinessRequestObject) (GetReadinessResponseObject, error) {
	if s.Ready != nil {
		if err := s.Ready(ctx); err != nil {
			return nil, fault.New(fault.Unavailable, "not_ready", "The hub cannot serve now; its log says why.", err)
		}
	}
	return GetReadiness200JSONResponse{Status: HealthStatusOk, Version: s.Version}, nil
}

// GetOpenAPI gives the contract as it was written.
func (s *Server) GetOpenAPI(context.Context, GetOpenAPIRequestObject) (GetOpenAPIResponseObject, error) {
	return GetOpenAPI200ApplicationYamlResponse{Body: bytes.NewReader(hubapi.OpenAPI), ContentLength: int64(len(hubapi.OpenAPI))}, nil
}
