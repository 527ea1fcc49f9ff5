package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"
)

const (
	// maxEventBytes bounds a line of an event stream.
	maxEventBytes = 1 << 20
	// followAgainAfter is the pause before a followed stream that broke is opened again.
	followAgainAfter = time.Second
)

// errLongLine ends a stream for good: the same line would come again.
var errLongLine = fmt.Errorf("a line has more than %d bytes", maxEventBytes)

// Events calls handle with each event that the hub streams, in order, and returns its first error. A followed stream
// that breaks or ends is opened again where it was: after the last event that handle has taken, or where the hub said
// that it was since. It goes on until ctx ends, and returns nil then. An event may come twice.
func Events(ctx context.Context, hub *Hub, p StreamEventsParams, handle func(Event) error, editors ...RequestEditorFn,
) error {
	for {
		last, err := streamOnce(ctx, hub, &p, handle, editors...)
		var stopped handlerError
		switch {
		case errors.As(err, &stopped):
			return stopped.error
		case ctx.Err() != nil && p.Follow:
			return nil
		case !p.Follow, err != nil && !passes(err):
			return err
		}
		if last != "" {
			p.LastEventID = last
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(followAgainAfter):
		}
	}
}

// passes reports whether a stream that failed so may be opened later.
func passes(err error) bool {
	var (
		lost    *UnreachableError
		problem *Problem
	)
	return errors.As(err, &lost) && isRetryable(err) ||
		errors.As(err, &problem) && (problem.Status >= http.StatusInternalServerError ||
			problem.Status == http.StatusTooManyRequests)
}

// handlerError is an error of the caller's own function.
type handlerError struct{ error }

// streamOnce reads one stream to its end, and returns the last id: of an event, or of where the stream was without one.
func streamOnce(ctx context.Context, hub *Hub, p *StreamEventsParams, handle func(Event) error,
	editors ...RequestEditorFn,
) (last string, err error) {
	res, err := hub.StreamEvents(ctx, p, editors...)
	if err != nil {
		return "", err
	}
	defer func() { _ = res.Body.Close() }()
	id := ""
	for lines := bufio.NewReaderSize(res.Body, 4096); ; {
		line, err := readLine(lines)
		if errors.Is(err, io.EOF) {
			return last, nil
		}
		if errors.Is(err, errLongLine) {
			return last, fmt.Errorf("the hub's event is not what the contract says: %w", err)
		}
		if err != nil {
			return last, unreachable(res.Request, err)
		}
		text, found := bytes.CutPrefix(line, []byte("data: "))
		if place, is := bytes.CutPrefix(line, []byte("id: ")); is {
			id = string(place)
		} else if len(line) == 0 && id != "" {
			last, id = id, ""
		}
		if !found {
			continue
		}
		var e Event
		if err := json.Unmarshal(text, &e); err != nil {
			return last, fmt.Errorf("the hub's event is not what the contract says: %w", err)
		}
		if err := handle(e); err != nil {
			return last, handlerError{err}
		}
		last, id = strconv.FormatInt(e.Pos, 10), ""
	}
}

// readLine reads a line to its end: one that the end of the stream has cut is none.
func readLine(r *bufio.Reader) (line []byte, err error) {
	for {
		part, err := r.ReadSlice('\n')
		switch line = append(line, part...); {
		case len(line) > maxEventBytes:
			return nil, errLongLine
		case err == nil:
			return bytes.TrimRight(line, "\r\n"), nil
		case !errors.Is(err, bufio.ErrBufferFull):
			return nil, err
		}
	}
}
