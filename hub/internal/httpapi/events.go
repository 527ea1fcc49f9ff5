package httpapi

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/query"
)

const (
	// eventStreamTime is how long followed events go on; the caller may follow them again.
	eventStreamTime = time.Hour
	// eventKeepAlive is the longest silence of a stream: proxies close connections that are silent for long.
	eventKeepAlive = 15 * time.Second
)

// StreamEvents streams what happens to everything that the caller may see.
func (s *Server) StreamEvents(ctx context.Context, r StreamEventsRequestObject) (StreamEventsResponseObject, error) {
	q := r.Params
	from := cmp.Or(q.LastEventID, q.After)
	reader, err := s.Queries.Events(ctx, principalOf(ctx), query.EventFilter{
		ProjectID: q.ProjectID, Subject: q.Subject, Types: typesOf(q.Type), After: positionOf(from),
		FromNow: from == "" && (q.Begin == StreamEventsParamsBeginNow || q.Begin == "" && q.Follow),
	})
	if err != nil {
		return nil, err
	}
	e := eventStream{reader: reader, follow: q.Follow, again: callOf(ctx).again, checkEvery: s.rightCheckEvery}
	if c, ok := ctx.(*gin.Context); ok {
		e.request = c.Request
	}
	return e, nil
}

// positionOf reads a position; the contract's check has refused what is none.
func positionOf(text string) int64 {
	n, _ := strconv.ParseInt(text, 10, 64)
	return n
}

// typesOf is the filter of one type; empty for all.
func typesOf(one string) []string {
	if one == "" {
		return nil
	}
	return []string{one}
}

// eventReader is a *query.EventReader.
type eventReader interface {
	Read(ctx context.Context) (events []event.Numbered, changed <-chan struct{}, ended bool, err error)
	Replace(caller iam.Principal)
	Position() int64
	FellBehind() bool
}

// eventStream sends events as they come.
type eventStream struct {
	reader eventReader
	follow bool
	// again returns the caller as it is now.
	again func(context.Context) (iam.Principal, error)
	// checkEvery is rightCheckEvery where it is zero.
	checkEvery time.Duration
	request    *http.Request
}

// VisitStreamEventsResponse makes it an answer of streamEvents.
func (e eventStream) VisitStreamEventsResponse(w http.ResponseWriter) error {
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
	out := newStreamWriter(w, transferTimeout, eventKeepAlive)
	defer out.End()
	out.Flush()
	if e.follow {
		if err := out.Send(e.place()); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(e.request.Context(), eventStreamTime)
	defer cancel()
	silent := time.NewTicker(eventKeepAlive)
	defer silent.Stop()
	check := time.NewTicker(cmp.Or(e.checkEvery, rightCheckEvery))
	defer check.Stop()
	for {
		changed, ended, err := e.send(ctx, out)
		if err != nil || ended || changed != nil && !e.follow {
			return err
		}
		if changed == nil {
			changed = atOnce() // there may be more; the checks are due all the same
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-check.C:
			if lostCaller(ctx, e.reader, e.again) {
				return nil
			}
		case <-silent.C:
			if err := out.Send(e.place()); err != nil {
				return err
			}
		}
	}
}

// send writes the events that there are. Where changed is nil, there may be more.
func (e eventStream) send(ctx context.Context, out *streamWriter) (changed <-chan struct{}, ended bool, err error) {
	events, changed, ended, err := e.reader.Read(ctx)
	if err != nil || len(events) == 0 {
		return changed, ended, err
	}
	text := events[0].Stream
	if len(events) > 1 {
		text = slices.Clone(text) // it is shared with the other readers
		for _, e := range events[1:] {
			text = append(text, e.Stream...)
		}
	}
	return changed, ended, out.Send(text)
}

// place tells how far the stream has come, by an id without an event: from there goes on who was cut off before it had
// an event, or long after it.
func (e eventStream) place() []byte {
	if pos := e.reader.Position(); pos > 0 {
		return fmt.Appendf(nil, "id: %d\n\n", pos)
	}
	return []byte(":\n\n")
}

// atOnce returns a channel that is closed.
func atOnce() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

// lostCaller reads the caller's rights anew, and reports whether it has lost its credential. A database that does not
// answer ends no stream.
func lostCaller(ctx context.Context, reader eventReader, again func(context.Context) (iam.Principal, error)) bool {
	ctx, cancel := context.WithTimeout(ctx, logCheckTimeout)
	defer cancel()
	p, err := again(ctx)
	if err == nil {
		reader.Replace(p)
	}
	return ended(err)
}
