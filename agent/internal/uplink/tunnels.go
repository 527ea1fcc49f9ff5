package uplink

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/pkg/duplex"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

const (
	// maxLogLines bounds the lines of a log that a tunnel reads back.
	maxLogLines = 10_000
	// dialTimeout bounds a connection to a published port of this machine.
	dialTimeout = 5 * time.Second
	// portCheckEvery is how often an open connection is checked to lead to a port that is still the member's.
	portCheckEvery = time.Second
)

// serveTunnels takes the streams that the hub opens. It does not wait for what a tunnel still has to end.
func (s *session) serveTunnels(ctx context.Context) error {
	for {
		stream, header, err := s.conn.Accept(ctx)
		if err != nil {
			return err
		}
		s.u.tunnels.Go(func() {
			if header.GetKind() != protocol.StreamHeader_KIND_TUNNEL {
				stream.Abort()
				return
			}
			ctx, end := traced(ctx, header.GetTraceparent(), "serve tunnel")
			s.tunnel(ctx, stream)
			end(nil)
		})
	}
}

func (s *session) tunnel(ctx context.Context, stream *link.Stream) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, stream.Abort)
	_ = stream.SetDeadline(time.Now().Add(sendTimeout))
	request := &protocol.TunnelRequest{}
	if err := stream.Receive(request, protocol.MaxHeaderBytes); err != nil {
		stream.Abort()
		return
	}
	switch r := request.GetRequest().(type) {
	case *protocol.TunnelRequest_Logs:
		s.serveLogs(ctx, cancel, stream, r.Logs)
	case *protocol.TunnelRequest_Connect:
		s.serveConnect(ctx, stream, r.Connect)
	case *protocol.TunnelRequest_Exec:
		s.serveExec(ctx, stream, r.Exec)
	case *protocol.TunnelRequest_Copy:
		s.serveCopy(ctx, stream, r.Copy)
	case *protocol.TunnelRequest_RemoveEnvironment:
		s.removeEnvironment(ctx, stream, r.RemoveEnvironment)
	default:
		refuseTunnel(stream, protocol.Nack_FEATURE_MISSING)
	}
	stop() // what the stream still has to deliver is delivered
}

// removeEnvironment answers once the environment is gone.
func (s *session) removeEnvironment(ctx context.Context, stream *link.Stream, r *protocol.RemoveEnvironmentRequest) {
	if s.u.cfg.RemoveEnvironment == nil {
		refuseTunnel(stream, protocol.Nack_FEATURE_MISSING)
		return
	}
	switch err := s.u.cfg.RemoveEnvironment(ctx, r.GetProjectId(), r.GetDigest()); {
	case fault.Is(err, fault.Conflict):
		refuseTunnel(stream, protocol.Nack_IN_USE)
	case err != nil:
		refuseTunnel(stream, protocol.Nack_UNAVAILABLE)
	case acceptTunnel(stream) == nil:
		_ = stream.Close()
	}
}

// serveLogs sends the log until its end, or until its reader has ended the stream.
func (s *session) serveLogs(ctx context.Context, cancel context.CancelFunc, stream *link.Stream,
	logs *protocol.LogsRequest,
) {
	if s.u.cfg.Logs == nil {
		refuseTunnel(stream, protocol.Nack_FEATURE_MISSING)
		return
	}
	source, err := s.u.openLogs(ctx, logs)
	if err != nil {
		refuseTunnel(stream, tunnelRefusal(err))
		return
	}
	if err := acceptTunnel(stream); err != nil {
		_ = source.Close()
		return
	}
	// A followed log may be silent for hours after its reader has ended the stream.
	go func() {
		select {
		case <-stream.Done():
			cancel()
		case <-ctx.Done():
		}
	}()
	_, err = io.Copy(stream, source)
	_ = source.Close()
	if err != nil && !errors.Is(err, io.EOF) {
		stream.Abort()
		return
	}
	_ = stream.Close()
}

// serveConnect joins the stream with a connection to a published port, for as long as the port is the member's.
func (s *session) serveConnect(ctx context.Context, stream *link.Stream, r *protocol.ConnectRequest) {
	host, err := s.u.hostPort(r)
	if err != nil {
		refuseTunnel(stream, tunnelRefusal(err))
		return
	}
	conn, err := dialPort(ctx, host)
	if err != nil {
		refuseTunnel(stream, protocol.Nack_UNAVAILABLE)
		return
	}
	if err := acceptTunnel(stream); err != nil {
		_ = conn.Close()
		return
	}
	ctx, cancel := context.WithCancelCause(ctx)
	var watching sync.WaitGroup
	watching.Go(func() { s.u.watchPort(ctx, cancel, r, host) })
	_, _, _ = duplex.Join(ctx, duplex.TCP(conn), stream)
	cancel(nil)
	watching.Wait()
}

func dialPort(ctx context.Context, port uint16) (*net.TCPConn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	to := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: int(port)}
	conn, err := new(net.Dialer).DialContext(ctx, "tcp4", to.String())
	if err != nil {
		return nil, err
	}
	return conn.(*net.TCPConn), nil //nolint:forcetypeassert // a dial of tcp4 makes nothing else
}

// watchPort ends the connection when the port is not the member's any more: the next member must not get it.
func (u *Uplink) watchPort(ctx context.Context, end context.CancelCauseFunc, r *protocol.ConnectRequest, host uint16) {
	again := time.NewTicker(portCheckEvery)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-again.C:
		}
		now, err := u.hostPort(r)
		if err == nil && now != host {
			err = errPortUnknown()
		}
		if err != nil {
			end(err)
			return
		}
	}
}

// hostPort finds the host port of a member's published port.
func (u *Uplink) hostPort(r *protocol.ConnectRequest) (uint16, error) {
	m, ok := u.store.Member(r.GetMemberId())
	i := slices.IndexFunc(m.Ports, func(p state.HostPort) bool { return p.Name == r.GetPort() })
	if !ok || i < 0 || !m.IsPublished(m.Ports[i].Service) {
		return 0, errPortUnknown()
	}
	return m.Ports[i].Host, nil
}

func errPortUnknown() error {
	return fault.New(fault.NotFound, codePortUnknown, "The node publishes no such port of the workload.", nil)
}

// acceptTunnel tells the hub that the stream carries raw bytes from here on.
func acceptTunnel(stream *link.Stream) error {
	if err := stream.Send(&protocol.TunnelResponse{}); err != nil {
		stream.Abort()
		return err
	}
	return stream.SetDeadline(time.Time{})
}

func tunnelRefusal(err error) protocol.Nack_Reason {
	if fault.Is(err, fault.NotFound) {
		return protocol.Nack_NOT_ASSIGNED
	}
	return protocol.Nack_UNAVAILABLE
}

func refuseTunnel(stream *link.Stream, reason protocol.Nack_Reason) {
	_ = stream.Send(&protocol.TunnelResponse{ErrorReason: reason})
	_ = stream.Close()
}

// openLogs finds the newest run of the member's service.
func (u *Uplink) openLogs(ctx context.Context, r *protocol.LogsRequest) (io.ReadCloser, error) {
	run, err := u.store.NewestRun(r.GetMemberId(), r.GetService())
	if err != nil {
		return nil, err
	}
	lines := min(int(r.GetTailLines()), maxLogLines)
	var since time.Time
	if r.GetSince() != nil {
		since = u.clock.ToMachineTime(r.GetSince().AsTime()) // the clock that the log was written by
	}
	return u.cfg.Logs(ctx, run.ID, lines, since, r.GetFollow())
}
