package httpapi

import (
	"bufio"
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/pkg/duplex"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// streamProtocol is what a request asks to upgrade to.
	streamProtocol = "gpuaas-stream"
	// rightCheckEvery is how often it is checked whether the caller still has the right to a stream.
	rightCheckEvery = 10 * time.Second
	// The actions of audit rows, those at the end of a stream with its bytes.
	actionConnect    = string(iam.InstanceConnect)
	actionDisconnect = "apps.instance.disconnect"
	actionExec       = string(iam.InstanceExec)
	actionExecEnd    = "apps.instance.exec_end"
	actionCopy       = "apps.instance.copy"
	actionCopyEnd    = "apps.instance.copy_end"
)

// ForwardAppInstancePort opens a stream to a port that the app publishes.
func (s *Server) ForwardAppInstancePort(ctx context.Context,
	r ForwardAppInstancePortRequestObject,
) (ForwardAppInstancePortResponseObject, error) {
	p, err := s.streamTo(ctx, iam.InstanceConnect, r.ProjectID, r.AppInstanceID, r.Body.MemberID)
	if err != nil {
		return nil, err
	}
	if !slices.ContainsFunc(p.member.Endpoints, func(e instance.Endpoint) bool { return e.Name == r.Body.Port }) {
		return nil, fault.New(fault.Conflict, codePortUnknown, "The app publishes no port of this name now; the "+
			"instance's endpoints name them.", nil).WithField("/port", "names no endpoint of the instance")
	}
	p.action, p.endAction = actionConnect, actionDisconnect
	p.detail["port"] = r.Body.Port
	return p.open(ctx, func(ctx context.Context) (duplex.Stream, error) {
		return s.NodeStreams.Connect(ctx, p.member.NodeID, p.instance.OrgID,
			&protocol.ConnectRequest{MemberId: p.member.ID, Port: r.Body.Port})
	})
}

// ExecInAppInstance runs a command in a container of the app. Only its first word is audited: the others may be secret.
func (s *Server) ExecInAppInstance(ctx context.Context,
	r ExecInAppInstanceRequestObject,
) (ExecInAppInstanceResponseObject, error) {
	p, err := s.streamTo(ctx, iam.InstanceExec, r.ProjectID, r.AppInstanceID, r.Body.MemberID)
	if err != nil {
		return nil, err
	}
	p.action, p.endAction = actionExec, actionExecEnd
	p.detail["command"], p.detail["terminal"] = r.Body.Command[0], r.Body.Terminal
	p.detail["service"] = r.Body.Service
	return p.open(ctx, func(ctx context.Context) (duplex.Stream, error) {
		return s.NodeStreams.Exec(ctx, p.member.NodeID, p.instance.OrgID, &protocol.ExecRequest{
			MemberId: p.member.ID, Service: r.Body.Service, Command: r.Body.Command, Terminal: r.Body.Terminal,
			Rows: uint32(r.Body.Rows), Columns: uint32(r.Body.Columns),
		})
	})
}

// CopyAppInstanceFiles copies files into or out of a container of the app.
func (s *Server) CopyAppInstanceFiles(ctx context.Context,
	r CopyAppInstanceFilesRequestObject,
) (CopyAppInstanceFilesResponseObject, error) {
	p, err := s.streamTo(ctx, iam.InstanceExec, r.ProjectID, r.AppInstanceID, r.Body.MemberID)
	if err != nil {
		return nil, err
	}
	p.action, p.endAction = actionCopy, actionCopyEnd
	p.detail["path"], p.detail["into"], p.detail["service"] = r.Body.Path, r.Body.Into, r.Body.Service
	return p.open(ctx, func(ctx context.Context) (duplex.Stream, error) {
		return s.NodeStreams.Copy(ctx, p.member.NodeID, p.instance.OrgID, &protocol.CopyRequest{
			MemberId: p.member.ID, Service: r.Body.Service, Path: r.Body.Path, Into: r.Body.Into,
		})
	})
}

// streamTo prepares a stream to a member of the instance; an empty memberID is the only one.
func (s *Server) streamTo(ctx context.Context, permission iam.Permission, projectID, instanceID, memberID string,
) (appStream, error) {
	i, err := s.Queries.InstanceFor(ctx, principalOf(ctx), permission, projectID, instanceID)
	if err != nil {
		return appStream{}, err
	}
	request, err := upgradeOf(ctx)
	if err != nil {
		return appStream{}, err
	}
	member, err := memberOf(i, memberID, "/member_id")
	p := appStream{
		server: s, request: request, meta: metaFrom(ctx), again: callOf(ctx).again, instance: i, member: member,
		permission: permission, projectID: projectID, detail: map[string]any{"member_id": member.ID},
	}
	if projectID != i.ProjectID {
		p.detail["attached_project_id"] = projectID
	}
	return p, err
}

// upgradeOf returns the request of an operation whose connection becomes a stream.
func upgradeOf(ctx context.Context) (*http.Request, error) {
	c, ok := ctx.(*gin.Context)
	if ok && c.Request.ProtoMajor == 1 && strings.EqualFold(c.GetHeader("Upgrade"), streamProtocol) &&
		strings.EqualFold(c.GetHeader("Connection"), "upgrade") {
		return c.Request, nil
	}
	return nil, fault.New(fault.Malformed, codeUpgradeMissing, "This operation turns an HTTP/1.1 connection into a "+
		"stream.", nil).
		WithHint("header/Upgrade", "is not "+streamProtocol, "HTTP/1.1 with Connection: Upgrade, Upgrade: "+streamProtocol).
		Permanent()
}

// appStream is a stream between a caller and an app.
type appStream struct {
	server   *Server
	request  *http.Request
	meta     command.Meta
	again    func(context.Context) (iam.Principal, error)
	instance instance.Instance
	member   instance.Member
	// projectID is the caller's: that of the instance, or one that is attached to it.
	projectID string
	// permission is needed for as long as the stream lasts.
	permission        iam.Permission
	action, endAction string
	detail            map[string]any
	node              duplex.Stream
}

// open opens the node's side and audits that. Nothing flows before the row is there.
func (p appStream) open(ctx context.Context,
	node func(context.Context) (duplex.Stream, error),
) (_ appStream, err error) {
	// The server ends a request's context with the first direction of its connection.
	if p.node, err = node(context.WithoutCancel(ctx)); err != nil {
		return p, err
	}
	if err := p.server.Commands.AuditStream(ctx, p.meta, p.action, p.instance, p.detail); err != nil {
		p.node.Abort()
		return p, err
	}
	return p, nil
}

// VisitExecInAppInstanceResponse makes it an answer of execInAppInstance.
func (p appStream) VisitExecInAppInstanceResponse(w http.ResponseWriter) error { return p.serve(w) }

// VisitCopyAppInstanceFilesResponse makes it an answer of copyAppInstanceFiles.
func (p appStream) VisitCopyAppInstanceFilesResponse(w http.ResponseWriter) error { return p.serve(w) }

// VisitForwardAppInstancePortResponse makes it an answer of forwardAppInstancePort.
func (p appStream) VisitForwardAppInstancePortResponse(w http.ResponseWriter) error {
	return p.serve(w)
}

// serve joins the caller's connection with the node's stream, and returns at their end.
func (p appStream) serve(w http.ResponseWriter) error {
	began := time.Now()
	toApp, fromApp, err := p.join(w)
	detail := maps.Clone(p.detail)
	maps.Copy(detail, map[string]any{"bytes_to_app": toApp, "bytes_from_app": fromApp})
	if lost := fault.As(err); err != nil && lost.Kind != fault.Internal {
		detail["ended_by"] = lost.Code
	}
	m := p.meta
	m.Now = m.Now.Add(time.Since(began))
	ctx, cancel := context.WithTimeout(context.WithoutCancel(p.request.Context()), auditTimeout)
	defer cancel()
	if err := p.server.Commands.AuditStream(ctx, m, p.endAction, p.instance, detail); err != nil {
		cmp.Or(p.server.Log, slog.New(slog.DiscardHandler)).ErrorContext(ctx, "audit row of a stream's end is lost",
			slog.Any("error", err))
	}
	return err
}

func (p appStream) join(w http.ResponseWriter) (toApp, fromApp int64, err error) {
	w.WriteHeader(http.StatusSwitchingProtocols) // for the log: a hijacked connection sends its own
	conn, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		p.node.Abort()
		return 0, 0, fmt.Errorf("take the connection over: %w", err)
	}
	caller := newHijackedStream(conn, buffered.Reader)
	if _, err := fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n%s: %s\r\n"+
		"\r\n", streamProtocol, requestIDHeader, p.meta.CorrelationID); err != nil {
		p.node.Abort()
		caller.Abort()
		return 0, 0, err
	}
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(p.request.Context()))
	var watching sync.WaitGroup
	watching.Go(func() { p.watch(ctx, cancel) })
	toApp, fromApp, err = duplex.Join(ctx, caller, p.node)
	cancel(nil)
	watching.Wait()
	return toApp, fromApp, err
}

// watch ends the stream when the caller loses the right to it, or the app leaves its node.
func (p appStream) watch(ctx context.Context, end context.CancelCauseFunc) {
	again := time.NewTicker(cmp.Or(p.server.rightCheckEvery, rightCheckEvery))
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-again.C:
		}
		// A database that does not answer ends no stream.
		if err := p.check(ctx); ended(err) || fault.Is(err, fault.Conflict) {
			end(err)
			return
		}
	}
}

func (p appStream) check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, logCheckTimeout)
	defer cancel()
	caller, err := p.again(ctx)
	if err != nil {
		return err
	}
	i, err := p.server.Queries.InstanceFor(ctx, caller, p.permission, p.projectID, p.instance.ID)
	if err != nil {
		return err
	}
	_, err = memberOf(i, p.member.ID, "/member_id")
	return err
}

// hijackedStream is the connection of a request, without the server; its reader has what came with the request.
type hijackedStream struct {
	net.Conn

	r *bufio.Reader
	// below is the connection under TLS, and out what it gathers; nil without TLS.
	below *cappedConn
	out   []byte
}

func newHijackedStream(conn net.Conn, r *bufio.Reader) hijackedStream {
	h := hijackedStream{Conn: conn, r: r}
	if t, ok := conn.(*tls.Conn); ok {
		if h.below, ok = t.NetConn().(*cappedConn); ok {
			h.out = make([]byte, 0, gatherBytes)
		}
	}
	return h
}

// Read implements duplex.Stream.
func (h hijackedStream) Read(b []byte) (int, error) { return h.r.Read(b) }

// Write implements duplex.Stream.
func (h hijackedStream) Write(b []byte) (int, error) {
	if h.below == nil {
		return h.Conn.Write(b)
	}
	h.below.gather(h.out)
	n, err := h.Conn.Write(b)
	if flushed := h.below.flush(); err == nil {
		err = flushed
	}
	return n, err
}

// CloseWrite implements duplex.Stream.
func (h hijackedStream) CloseWrite() error {
	if c, ok := h.Conn.(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return fmt.Errorf("half-close: %w", http.ErrNotSupported)
}

// Abort implements duplex.Stream by a reset, without TLS's close_notify.
func (h hijackedStream) Abort() {
	below := h.Conn
	if t, ok := below.(*tls.Conn); ok {
		below = t.NetConn()
	}
	socket := below
	if c, ok := socket.(*cappedConn); ok {
		socket = c.Conn
	}
	if c, ok := socket.(*net.TCPConn); ok {
		_ = c.SetLinger(0)
	}
	_ = below.Close()
}
