package nodelink

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/gpuaas/gpuaas/pkg/duplex"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// tunnelRetryAfter is when a caller whose tunnel was refused may try again.
const tunnelRetryAfter = 10 * time.Second

// tunnels counts the open tunnels of one connection by org: orgs share the node, and none may use all tunnels.
type tunnels struct {
	mu    sync.Mutex
	open  map[string]int
	total int
}

// acquire reserves one of the org's tunnels until free is called.
func (t *tunnels) acquire(orgID string) (free func(), err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	busy := func(format string, n int) error {
		return fault.New(fault.RateLimited, codeTunnelsBusy, fmt.Sprintf(format, n), nil).RetryAfter(tunnelRetryAfter)
	}
	if t.open[orgID] >= maxOrgTunnels {
		return nil, busy("Your org has %d streams to this node open already; close one.", maxOrgTunnels)
	}
	if t.total >= maxTunnels {
		return nil, busy("%d streams to this node are open already; try again in a moment.", maxTunnels)
	}
	if t.open == nil {
		t.open = map[string]int{}
	}
	t.open[orgID]++
	t.total++
	return sync.OnceFunc(func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.total--
		if t.open[orgID]--; t.open[orgID] == 0 {
			delete(t.open, orgID)
		}
	}), nil
}

func unreachable(cause error) error {
	return fault.New(fault.Unavailable, codeNodeUnreachable, "The node is not connected now; try again later.",
		cause).RetryAfter(10 * time.Second)
}

// Logs opens a stream of the log of an org's member on the node that runs it. The caller closes it.
func (s *Server) Logs(ctx context.Context, nodeID, orgID string, logs *protocol.LogsRequest) (io.ReadCloser, error) {
	t, err := s.openTunnel(ctx, nodeID, orgID, &protocol.TunnelRequest{
		Request: &protocol.TunnelRequest_Logs{Logs: logs},
	})
	if err != nil {
		return nil, err
	}
	return logTunnel{t}, nil
}

// Connect opens a stream to a published port of an org's member on the node that runs it. The end of ctx aborts it.
func (s *Server) Connect(ctx context.Context, nodeID, orgID string, r *protocol.ConnectRequest) (duplex.Stream, error) {
	t, err := s.openTunnel(ctx, nodeID, orgID, &protocol.TunnelRequest{
		Request: &protocol.TunnelRequest_Connect{Connect: r},
	})
	if err != nil {
		return nil, err // not a nil tunnel in an interface
	}
	return t, nil
}

// Exec runs a command in a container of an org's member on the node that runs it. The stream carries the frames of
// pkg/execstream; its end, and the end of ctx, kill the command.
func (s *Server) Exec(ctx context.Context, nodeID, orgID string, r *protocol.ExecRequest) (duplex.Stream, error) {
	t, err := s.openTunnel(ctx, nodeID, orgID, &protocol.TunnelRequest{Request: &protocol.TunnelRequest_Exec{Exec: r}})
	if err != nil {
		return nil, err // not a nil tunnel in an interface
	}
	return t, nil
}

// Copy copies files into or out of a container of an org's member on the node that runs it. The stream carries the
// frames of pkg/execstream.
func (s *Server) Copy(ctx context.Context, nodeID, orgID string, r *protocol.CopyRequest) (duplex.Stream, error) {
	t, err := s.openTunnel(ctx, nodeID, orgID, &protocol.TunnelRequest{Request: &protocol.TunnelRequest_Copy{Copy: r}})
	if err != nil {
		return nil, err // not a nil tunnel in an interface
	}
	return t, nil
}

// RemoveEnvironment removes an environment of an org's project from a node. One that is in use is a Conflict.
func (s *Server) RemoveEnvironment(ctx context.Context, nodeID, orgID string,
	r *protocol.RemoveEnvironmentRequest,
) error {
	t, err := s.openTunnel(ctx, nodeID, orgID, &protocol.TunnelRequest{
		Request: &protocol.TunnelRequest_RemoveEnvironment{RemoveEnvironment: r},
	})
	if err == nil {
		t.Abort() // nothing follows the answer, and the node may have ended the stream
	}
	return err
}

// openTunnel opens a tunnel within the budgets of the node and of the org, and returns it once the node has accepted
// the request. It fails at once where the node is not connected.
func (s *Server) openTunnel(ctx context.Context, nodeID, orgID string, r *protocol.TunnelRequest) (*tunnel, error) {
	c := s.find(nodeID)
	if c == nil {
		return nil, unreachable(nil)
	}
	free, err := c.tunnels.acquire(orgID)
	if err != nil {
		return nil, err
	}
	opening, cancel := context.WithTimeout(ctx, tunnelAnswerTimeout)
	defer cancel()
	stream, err := c.conn.Open(opening, &protocol.StreamHeader{
		Kind:        protocol.StreamHeader_KIND_TUNNEL,
		Traceparent: telemetry.Traceparent(ctx),
	})
	if err != nil {
		free()
		return nil, unreachable(err)
	}
	// From here on the end of ctx aborts the stream.
	stop := context.AfterFunc(ctx, stream.Abort)
	t := &tunnel{Stream: stream, release: func() { stop(); free() }}
	answer := &protocol.TunnelResponse{}
	_ = stream.SetDeadline(time.Now().Add(tunnelAnswerTimeout))
	err = stream.Send(r)
	if err == nil {
		err = stream.Receive(answer, protocol.MaxHeaderBytes)
	}
	if err != nil {
		t.Abort()
		return nil, unreachable(err)
	}
	if reason := answer.GetErrorReason(); reason != 0 {
		t.Abort()
		return nil, refused(reason)
	}
	_ = stream.SetDeadline(time.Time{})
	return t, nil
}

// refused is the fault of a tunnel that the node has refused.
func refused(reason protocol.Nack_Reason) error {
	if reason == protocol.Nack_UNAVAILABLE {
		return fault.New(fault.Unavailable, codeAppUnavailable, "The app does not answer on its node; look at its status, "+
			"and try again.", nil).RetryAfter(time.Second)
	}
	if reason == protocol.Nack_IN_USE {
		return fault.New(fault.Conflict, codeInUse, "An app instance uses the environment; decommission it, or upgrade it "+
			"without the environment.", nil)
	}
	return fault.New(fault.Conflict, codeNodeRefused, "The node refuses the stream: "+reason.Text()+".", nil)
}

// tunnel is an open tunnel stream; Close and Abort release its slot.
type tunnel struct {
	*link.Stream

	release func()
}

// Close implements duplex.Stream.
func (t *tunnel) Close() error {
	t.release()
	return t.Stream.Close()
}

// Abort implements duplex.Stream.
func (t *tunnel) Abort() {
	t.release()
	t.Stream.Abort()
}

// logTunnel is a tunnel that is only read: its reader may leave before its end.
type logTunnel struct{ *tunnel }

// Close implements io.Closer.
func (t logTunnel) Close() error {
	t.Abort()
	return nil
}
