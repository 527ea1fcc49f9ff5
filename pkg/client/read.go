package client

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"net/http"
)

// maxAnswerBytes bounds a JSON answer; a page of 200 items is far below.
const maxAnswerBytes = 64 << 20

// PageSize is the limit that All's callers do well to ask for: the largest that the contract allows.
const PageSize = 200

// Read decodes the answer of an operation: client.Read[client.Node](hub.GetNode(ctx, id)).
func Read[T any](res *http.Response, err error) (T, error) {
	var out T
	if err != nil {
		return out, err
	}
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(res.Body, maxAnswerBytes))
	if err != nil && res.Request != nil {
		// The hub went away in the middle of its answer.
		return out, unreachable(res.Request, err)
	}
	if err == nil {
		err = json.Unmarshal(body, &out)
	}
	if err != nil {
		return out, fmt.Errorf("the hub's answer is not what the contract says (correlation id %s): %w",
			res.Header.Get(requestIDHeader), err)
	}
	return out, nil
}

// Replayed tells whether an answer is an earlier one, given again for the same idempotency key.
func Replayed(res *http.Response) bool { return res.Header.Get("Idempotency-Replayed") == "true" }

// page is what the lists of the contract have in common.
type page[T any] struct {
	Items      []T    `json:"items"`
	NextCursor string `json:"next_cursor"`
}

// All walks through every page of a list. ask asks for the one at a cursor:
//
//	client.All[client.Org](func(cursor string) (*http.Response, error) {
//		return hub.ListOrgs(ctx, &client.ListOrgsParams{Cursor: cursor, Limit: client.PageSize})
//	})
func All[T any](ask func(cursor string) (*http.Response, error)) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var zero T
		for cursor := ""; ; {
			p, err := Read[page[T]](ask(cursor))
			if err != nil {
				yield(zero, err)
				return
			}
			for _, item := range p.Items {
				if !yield(item, nil) {
					return
				}
			}
			if p.NextCursor == "" || p.NextCursor == cursor {
				return
			}
			cursor = p.NextCursor
		}
	}
}

// GetAppInstance reads an app instance at once; Watch waits for changes.
func (h *Hub) GetAppInstance(ctx context.Context, projectID, id string,
	editors ...RequestEditorFn,
) (*http.Response, error) {
	return h.Client.GetAppInstance(ctx, projectID, id, nil, editors...)
}

// GetAllocation reads an allocation at once.
func (h *Hub) GetAllocation(ctx context.Context, projectID, id string,
	editors ...RequestEditorFn,
) (*http.Response, error) {
	return h.Client.GetAllocation(ctx, projectID, id, nil, editors...)
}

// GetNode reads a node at once.
func (h *Hub) GetNode(ctx context.Context, id string, editors ...RequestEditorFn) (*http.Response, error) {
	return h.Client.GetNode(ctx, id, nil, editors...)
}

// IfMatch has a change done only to the version that an answer had: the hub answers 412 once there is another. An
// answer without an ETag sets no condition.
func IfMatch(res *http.Response) RequestEditorFn {
	return func(_ context.Context, r *http.Request) error {
		if tag := res.Header.Get("ETag"); tag != "" {
			r.Header.Set("If-Match", tag)
		}
		return nil
	}
}
