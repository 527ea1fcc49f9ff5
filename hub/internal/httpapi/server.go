// Package httpapi serves the hub's REST API: it checks requests against the contract, authenticates the caller, calls
// the commands and the queries, and turns a fault into a problem document in one place. It holds no rule about
// resources.
package httpapi

import (
	"context"
	"io"
	"log/slog"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/query"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/duplex"
	"github.com/gpuaas/gpuaas/protocol"
)

// NodeStreams opens streams to the nodes that run members. orgID is whose share of a node's streams it takes.
type NodeStreams interface {
	Logs(ctx context.Context, nodeID, orgID string, r *protocol.LogsRequest) (io.ReadCloser, error)
	// Connect opens a stream to a published port; the end of ctx aborts it.
	Connect(ctx context.Context, nodeID, orgID string, r *protocol.ConnectRequest) (duplex.Stream, error)
	// Exec runs a command in a container; the end of ctx aborts the stream and kills the command.
	Exec(ctx context.Context, nodeID, orgID string, r *protocol.ExecRequest) (duplex.Stream, error)
	// Copy copies files into or out of a container; the end of ctx aborts the stream and ends the copy.
	Copy(ctx context.Context, nodeID, orgID string, r *protocol.CopyRequest) (duplex.Stream, error)
	// RemoveEnvironment returns once the node has removed an environment, or refused to.
	RemoveEnvironment(ctx context.Context, nodeID, orgID string, r *protocol.RemoveEnvironmentRequest) error
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
	NodeStreams               NodeStreams
	// logCheckEvery and rightCheckEvery are the constants of these names where they are zero.
	logCheckEvery, rightCheckEvery time.Duration
	// Log gets what goes wrong after an answer has begun; nil discards it.
	Log *slog.Logger
}

var _ StrictServerInterface = (*Server)(nil)
