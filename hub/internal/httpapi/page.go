package httpapi

import (
	"net/http"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/query"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	defaultPage = 50
	maxPage     = 200
)

// page reads one page of a listing and the cursor of the next: one item more than asked for tells whether there is one.
func page[T any](after Cursor, limit Limit, read func(db.Page) ([]T, error), cursorOf func(T) string,
) (items []T, next string, err error) {
	n := limitOf(limit)
	items, err = read(db.Page{After: after, Limit: n + 1})
	if len(items) > n {
		items, next = items[:n], cursorOf(items[n-1])
	}
	return items, next, err
}

// pageByID is page for a listing in order of ids.
func pageByID[T any](after Cursor, limit Limit, read func(db.Page) ([]T, error),
	idOf func(T) string,
) (items []T, next string, err error) {
	if _, err := cursorID(after); err != nil {
		return nil, "", err
	}
	return page(after, limit, read, idOf)
}

func views[T, V any](items []T, view func(T) V) []V {
	out := make([]V, len(items))
	for i, item := range items {
		out[i] = view(item)
	}
	return out
}

// decodedViews is views where the rows hold JSON that may not be readable.
func decodedViews[T, V any](items []T, view func(T) (V, error)) (out []V, err error) {
	out = make([]V, len(items))
	for i, item := range items {
		if out[i], err = view(item); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// limitOf gives the page size that was asked for. The contract's check has refused what is out of range.
func limitOf(limit Limit) int {
	if limit <= 0 {
		return defaultPage
	}
	return min(int(limit), maxPage)
}

// cursorID reads the cursor of a listing that goes by id.
func cursorID(cursor string) (after string, err error) {
	if cursor != "" && !db.IsID(cursor) {
		return "", fault.CursorInvalid()
	}
	return cursor, nil
}

// waits reports whether a request may wait for a change.
func waits(r *http.Request) bool { return r.Method == http.MethodGet && r.URL.Query().Has("wait") }

// watchOf reads how long a read waits for a change; the contract's check has refused other forms.
func watchOf(after int64, wait string) query.Watch {
	d, _ := time.ParseDuration(wait)
	return query.Watch{After: after, Wait: d}
}
