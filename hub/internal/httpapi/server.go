// Package httpapi serves the hub's REST API: it checks requests against the contract, authenticates the caller, calls
// the commands and the queries, and turns a fault into a problem document in one place. It holds no rule about
// resources.
package httpapi

import (
	"context"
	"io"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/query"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/protocol"
)

// LogSource fetches what a member writes, from the node that runs it.
type LogSource interface {
	// orgID is whose share of the node's streams it takes.
	Logs(ctx context.Context, nodeID, orgID string, r *protocol.LogsRequest) (io.ReadCloser, error)
}

// Server answers the operations of the contract. Its methods are in one file for each resource. The program that wires
// the hub fills the fields.
type Server struct {
	// Version is the hub's own, for healthz.
	Version string
	// Ready says why the hub cannot serve, or nil; a nil func is always ready.
	Ready     func(ctx context.Context) error
	readiness readiness

	Commands *command.Service
	Queries  *query.Service

	Keys *trust.Keys
	// SessionAddr is host:port of the QUIC listener and RegistryHost that of the registry, as nodes reach them.
	SessionAddr, RegistryHost string
	Logs                      LogSource
	// logCheckEvery is the constant of this name where it is zero.
	logCheckEvery time.Duration
}

var _ StrictServerInterface = (*Server)(nil)
