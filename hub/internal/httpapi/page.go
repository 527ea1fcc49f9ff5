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
		return "", fault.New(fault.Malformed, fault.CodeCursorInvalid, "The cursor is not one that this listing gave.",
			nil).WithField("query/cursor", "not a cursor of this listing").Permanent()
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
