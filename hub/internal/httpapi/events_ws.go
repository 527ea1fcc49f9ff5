package httpapi

import (
	"cmp"
	"context"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/coder/websocket"
	"github.com/gin-gonic/gin"

	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/query"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	// socketWriteTime is how long a client may take for one message before it is cut off.
	socketWriteTime = 10 * time.Second
	// The reasons of a close frame.
	closeCredentialEnded = "credential_ended" //nolint:gosec // a reason, not a credential
	closeTooSlow         = "too_slow"
	closeAgain           = "connect_again"
)

// FollowEvents sends what happens to everything that the caller may see over a WebSocket.
func (s *Server) FollowEvents(ctx context.Context, r FollowEventsRequestObject) (FollowEventsResponseObject, error) {
	c, ok := ctx.(*gin.Context)
	if !ok || c.Request.ProtoMajor != 1 || !strings.EqualFold(c.GetHeader("Upgrade"), "websocket") {
		return nil, fault.New(fault.Malformed, codeUpgradeMissing, "This operation turns an HTTP/1.1 connection into a "+
			"WebSocket.", nil).
			WithHint("header/Upgrade", "is not websocket", "a WebSocket client over HTTP/1.1").Permanent()
	}
	q := r.Params
	reader, err := s.Queries.Events(ctx, principalOf(ctx), query.EventFilter{
		ProjectID: q.ProjectID, Subject: q.Subject, Types: typesOf(q.Type), After: positionOf(q.After),
		FromNow: q.After == "" && q.Begin != FollowEventsParamsBeginOldest,
	})
	if err != nil {
		return nil, err
	}
	return eventSocket{
		reader: reader, again: callOf(ctx).again, request: c.Request, checkEvery: s.rightCheckEvery,
		log: cmp.Or(s.Log, slog.New(slog.DiscardHandler)),
	}, nil
}

// eventSocket sends events as messages of a WebSocket.
type eventSocket struct {
	reader eventReader
	// again returns the caller as it is now.
	again   func(context.Context) (iam.Principal, error)
	request *http.Request
	// checkEvery and writeTime are rightCheckEvery and socketWriteTime where they are zero.
	checkEvery, writeTime time.Duration
	log                   *slog.Logger
}

// VisitFollowEventsResponse makes it an answer of followEvents.
func (e eventSocket) VisitFollowEventsResponse(w http.ResponseWriter) error {
	conn, err := websocket.Accept(w, e.request, nil)
	if err != nil {
		return err
	}
	defer func() { _ = conn.CloseNow() }()
	// What reads notices the answers to pings, and ends the stream when the client closes it or sends a message.
	ctx, cancel := context.WithTimeout(conn.CloseRead(e.request.Context()), eventStreamTime)
	defer cancel()
	code, reason, err := e.follow(ctx, conn)
	if err != nil {
		e.log.InfoContext(ctx, "a client of events was cut off", slog.Any("error", err))
		return err
	}
	return conn.Close(code, reason)
}

// follow sends events until the stream ends, and returns what to tell the client.
func (e eventSocket) follow(ctx context.Context, conn *websocket.Conn) (websocket.StatusCode, string, error) {
	ping := time.NewTicker(eventKeepAlive)
	defer ping.Stop()
	check := time.NewTicker(cmp.Or(e.checkEvery, rightCheckEvery))
	defer check.Stop()
	for {
		events, changed, ended, err := e.reader.Read(ctx)
		switch {
		case ctx.Err() != nil:
			return websocket.StatusGoingAway, closeAgain, nil
		case err != nil:
			return 0, "", err
		case e.reader.FellBehind():
			return websocket.StatusPolicyViolation, closeTooSlow, nil
		}
		for _, event := range slices.Clone(events) { // each may take seconds
			if err := e.write(ctx, conn, event.JSON); err != nil {
				return 0, "", err
			}
		}
		if ended {
			return websocket.StatusGoingAway, closeAgain, nil
		}
		if changed == nil {
			changed = atOnce() // there may be more; the checks are due all the same
		}
		select {
		case <-ctx.Done():
			return websocket.StatusGoingAway, closeAgain, nil
		case <-changed:
		case <-check.C:
			if lostCaller(ctx, e.reader, e.again) {
				return websocket.StatusPolicyViolation, closeCredentialEnded, nil
			}
		case <-ping.C:
			if err := e.bounded(ctx, conn.Ping); err != nil {
				return 0, "", err
			}
		}
	}
}

func (e eventSocket) write(ctx context.Context, conn *websocket.Conn, message []byte) error {
	return e.bounded(ctx, func(ctx context.Context) error { return conn.Write(ctx, websocket.MessageText, message) })
}

// bounded gives the client a limited time. After it the connection is cut: half a message may be on it.
func (e eventSocket) bounded(ctx context.Context, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(e.writeTime, socketWriteTime))
	defer cancel()
	return do(ctx)
}
