package nodelink

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/time/rate"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// connection is one node's session.
type connection struct {
	handler Handler
	// disconnects is Server.disconnects from before the hello was answered.
	disconnects uint64
	// pushes is shared by all connections (maxParallelPushes).
	pushes  chan struct{}
	peer    Peer
	conn    *link.Conn
	control *link.Stream
	out     *outbox
	log     *slog.Logger
	tunnels tunnels
	// now is the hub's time.
	now func() time.Time
	// traces bounds how many of the node's requests are traced.
	traces *rate.Limiter
	// uploaded is closed when the node has uploaded its state to a restored hub, or at once where none is needed.
	uploaded   chan struct{}
	uploadDone func()
	// incarnation is the one of the hello; messageBytes bounds each message of the node.
	incarnation  string
	messageBytes int

	mu    sync.Mutex
	acked AckedState
	// The last pushed state; it becomes acked when the node acknowledges it.
	pushedGeneration uint64
	pushedSHA256     []byte
	pulls            pulls
}

// closeGrace is how long a node has to read GoAway.
const closeGrace = time.Second

const (
	// tracesPerSecond and tracesBurst bound the requests of one node that are traced.
	tracesPerSecond = 10
	tracesBurst     = 100
)

func goAway(reason string) *protocol.HubMessage {
	return &protocol.HubMessage{Message: &protocol.HubMessage_GoAway{GoAway: &protocol.GoAway{Reason: reason}}}
}

// end sends GoAway and closes the connection when the node has closed it, or a moment later.
func (c *connection) end(code uint64, reason string) {
	c.out.put(goAway(reason))
	// Not in the writer, which may be blocked.
	go func() {
		t := time.NewTimer(closeGrace)
		defer t.Stop()
		select {
		case <-t.C:
		case <-c.conn.Done():
		}
		_ = c.conn.Close(code, reason)
	}()
}

// run serves the connection until it ends and returns why.
func (c *connection) run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var streams sync.WaitGroup
	streams.Go(func() { cancel(c.write(ctx)) })
	streams.Go(func() {
		cancel(c.read(ctx, func(m *protocol.NodeMessage) error { return c.control.Receive(m, c.messageLimit()) }))
	})
	// On this goroutine: a hub holds thousands of connections, and each one more costs its stack.
	cancel(c.accept(ctx, &streams))
	_ = c.conn.Close(link.CodeProtocol, fmt.Sprint(context.Cause(ctx)))
	streams.Wait()
	return context.Cause(ctx)
}

// write sends the messages of the outbox.
func (c *connection) write(ctx context.Context) error {
	for {
		m := c.out.next()
		if m == nil {
			select {
			case <-c.out.wake:
				continue
			case <-ctx.Done():
				return ctx.Err()
			case <-c.conn.Done():
				return link.ErrClosed
			}
		}
		if err := c.send(ctx, m); err != nil {
			return err
		}
		failpoint.Hit("hub/session/message_sent")
		if m.GetGoAway() != nil {
			_ = c.control.CloseWrite()
			<-c.conn.Done()
			return errors.New(m.GetGoAway().GetReason())
		}
	}
}

func (c *connection) send(ctx context.Context, m *protocol.HubMessage) error {
	if m.GetPushState() != nil {
		t := time.NewTimer(pushWait)
		defer t.Stop()
		select {
		case c.pushes <- struct{}{}:
			defer func() { <-c.pushes }()
		case <-t.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	_ = c.control.SetWriteDeadline(time.Now().Add(writeTimeout))
	return c.control.Send(m)
}

// messageBudget bounds the rate at which the messages of a node are read.
type messageBudget struct {
	limiter *rate.Limiter
	// generation is the newest pushed one; answers is how many messages after it still do not count.
	generation uint64
	answers    int
}

// wait returns when the node's next message may be read; generation is the newest that was pushed by then.
func (h *messageBudget) wait(ctx context.Context, generation uint64) error {
	if generation > h.generation {
		h.generation, h.answers = generation, messagesPerState
	}
	if h.answers > 0 {
		h.answers--
		return nil
	}
	return h.limiter.Wait(ctx)
}

func (c *connection) pushed() (generation uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pushedGeneration
}

// read handles the messages of the control stream one after the other, within the node's budget.
func (c *connection) read(ctx context.Context, receive func(*protocol.NodeMessage) error) error {
	budget := messageBudget{limiter: rate.NewLimiter(messageRate, messageBurst)}
	for {
		m := &protocol.NodeMessage{}
		if err := receive(m); err != nil {
			return err
		}
		if err := budget.wait(ctx, c.pushed()); err != nil {
			return err
		}
		var err error
		switch {
		case m.GetReport() != nil:
			err = c.report(ctx, m.GetReport())
		case m.GetAck() != nil:
			err = c.ack(ctx, m.GetAck())
		case m.GetNack() != nil:
			err = c.nack(ctx, m.GetNack())
		case m.GetPullProgress() != nil:
			err = c.pullProgress(ctx, m.GetPullProgress())
		case m.GetStateUpload() != nil:
			if err := c.handler.StateUpload(ctx, c.peer, m.GetStateUpload()); err != nil {
				return err // the node reconnects and uploads again
			}
			if m.GetStateUpload().GetLast() {
				c.uploadDone()
			}
		case m.GetHello() != nil:
			return errors.New("a second hello")
		default:
			// A message of a newer protocol; the session continues.
			c.log.InfoContext(ctx, "unknown message ignored")
		}
		if err != nil {
			// The node repeats reports, and what it gets no answer to.
			c.log.WarnContext(ctx, "message not taken in", slog.Any("error", err))
		}
	}
}

// messageLimit is the size limit of the node's next message. A state upload is larger than a report.
func (c *connection) messageLimit() int {
	select {
	case <-c.uploaded:
		return c.messageBytes
	default:
		return protocol.MaxControlBytes
	}
}

func (c *connection) report(ctx context.Context, r *protocol.Report) error {
	if err := c.handler.Report(ctx, c.peer, c.acked.SessionNo, r); err != nil {
		return err
	}
	c.out.put(&protocol.HubMessage{Message: &protocol.HubMessage_ReportAck{
		ReportAck: &protocol.ReportAck{Counter: r.GetCounter(), HubTime: timestamppb.New(c.now())},
	}})
	failpoint.Hit("hub/report/acknowledged")
	return nil
}

func (c *connection) ack(ctx context.Context, a *protocol.Ack) error {
	c.mu.Lock()
	switch a.GetDocument() { //nolint:exhaustive // leases leave no mark
	case protocol.Envelope_STATE:
		c.acked.Epoch, c.acked.Generation, c.acked.StateSHA256 = a.GetEpoch(), a.GetGeneration(), nil
		if c.pushedGeneration == a.GetGeneration() {
			c.acked.StateSHA256 = c.pushedSHA256
		}
	case protocol.Envelope_BUNDLE:
		c.acked.BundleVersion = a.GetGeneration()
	}
	c.mu.Unlock()
	return c.handler.Ack(ctx, c.peer.NodeID, a)
}

// nack handles the refusal of a document. Refused leases count as never pushed: the next sync pushes them again, as it
// does a state that the node does not hold.
func (c *connection) nack(ctx context.Context, r *protocol.Nack) error {
	if r.GetDocument() == protocol.Envelope_LEASES {
		c.mu.Lock()
		c.acked.LeasesSHA256 = nil
		c.mu.Unlock()
	}
	return c.handler.Nack(ctx, c.peer, r)
}

// accept serves the streams that the node opens. Each kind has its own limit.
func (c *connection) accept(ctx context.Context, running *sync.WaitGroup) error {
	usage, fetches := make(chan struct{}, maxUsageStreams), make(chan struct{}, maxFetches)
	for {
		stream, header, err := c.conn.Accept(ctx)
		if err != nil {
			return err
		}
		slots, serve := fetches, c.fetch
		switch header.GetKind() {
		case protocol.StreamHeader_KIND_USAGE:
			slots, serve = usage, c.usage
		case protocol.StreamHeader_KIND_FETCH:
		default:
			stream.Abort()
			continue
		}
		select {
		case slots <- struct{}{}:
		default:
			stream.Abort()
			continue
		}
		running.Go(func() {
			defer func() { <-slots }()
			serve(c.continued(ctx, header), stream)
		})
	}
}

// continued is within the node's span that opened a stream. A node may have so many of its requests traced.
func (c *connection) continued(ctx context.Context, header *protocol.StreamHeader) context.Context {
	if c.traces.Allow() {
		return telemetry.Continue(ctx, header.GetTraceparent())
	}
	return telemetry.ContinueUnsampled(ctx, header.GetTraceparent())
}

// usage serves a usage stream, after the state upload where a restored hub needs one: usage of a member that the hub
// does not know would be lost.
func (c *connection) usage(ctx context.Context, stream *link.Stream) {
	defer func() { _ = stream.Close() }()
	select {
	case <-c.uploaded:
	case <-ctx.Done():
		return
	}
	err := c.handler.ServeUsage(ctx, c.peer, c.incarnation, UsageStream{stream})
	if !errors.Is(err, io.EOF) {
		c.log.InfoContext(ctx, "usage stream ended", slog.Any("error", err))
	}
}

// fetch answers one request.
func (c *connection) fetch(ctx context.Context, stream *link.Stream) {
	defer func() { _ = stream.Close() }()
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	_ = stream.SetDeadline(time.Now().Add(fetchTimeout))
	request := &protocol.FetchRequest{}
	if err := stream.Receive(request, protocol.MaxHeaderBytes); err != nil {
		return
	}
	response, err := c.tracedFetch(ctx, request)
	if err != nil {
		c.log.InfoContext(ctx, "fetch refused", slog.Any("error", err))
		response = &protocol.FetchResponse{ErrorReason: fetchErrorReason(err)}
	}
	_ = stream.Send(response)
}

func (c *connection) tracedFetch(ctx context.Context, request *protocol.FetchRequest) (*protocol.FetchResponse, error) {
	if !trace.SpanContextFromContext(ctx).IsValid() {
		return c.handler.Fetch(ctx, c.peer.NodeID, request)
	}
	ctx, span := otel.Tracer("gpuaas/nodelink").Start(ctx, "answer fetch", trace.WithSpanKind(trace.SpanKindServer),
		trace.WithAttributes(attribute.String("gpuaas.node_id", c.peer.NodeID)))
	response, err := c.handler.Fetch(ctx, c.peer.NodeID, request)
	telemetry.EndSpan(span, err)
	return response, err
}

// fetchErrorReason is the reason of a refusal; any other error is temporary.
func fetchErrorReason(err error) protocol.Nack_Reason {
	if r, ok := errors.AsType[*protocol.RefusalError](err); ok {
		return r.Reason
	}
	return protocol.Nack_UNAVAILABLE
}
