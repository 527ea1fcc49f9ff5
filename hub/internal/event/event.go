// Package event owns the outbox of events, the sequencer that gives committed events their dense position, the tail
// that readers follow, and the audit trail. A row is written in the transaction of the change itself. Who may read an
// event, others decide.
package event

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
)

const (
	// maxDataBytes bounds an event's own data; larger belongs into the resource.
	maxDataBytes = 64 << 10
	// maxStateBytes bounds each of before and after of an audit row; a larger one is replaced by its size.
	maxStateBytes = 256 << 10
	// MaxPage bounds a listing; one more row may be asked for, which tells whether there is another page.
	MaxPage = 200
)

// Event is one change that others may want to know of.
type Event struct {
	// ID is made by Append where it is empty.
	ID string
	// Type is dotted, like apps.instance.running.
	Type string
	// Subject is the id of the resource that changed.
	Subject string
	// ResourceVersion is that of the resource's row after the change.
	ResourceVersion int64
	// OrgID and ProjectID are empty for platform resources.
	OrgID, ProjectID string
	CorrelationID    string
	// Traceparent is the W3C trace context of the request that led to it; empty for none.
	Traceparent string
	// Data is an object with the event's own members (from, to, reason, requested_by, …).
	Data any
	At   time.Time
	// Pos is dense over all events, in an order that every reader sees alike; 0 until the sequencer has been.
	Pos int64
}

// Append writes e to the outbox. Its type must be one of Types. Fields of Data with the name of a
// secret are redacted.
func Append(ctx context.Context, tx db.Tx, e Event) error {
	if e.Type == "" || e.Subject == "" || e.At.IsZero() {
		return fmt.Errorf("event %q of %q: type, subject and time are required", e.Type, e.Subject)
	}
	if !knownType(e.Type) {
		return fmt.Errorf("event type %q is not in the contract", e.Type)
	}
	if e.ID == "" {
		e.ID = db.NewID()
	}
	data := json.RawMessage(`{}`)
	if e.Data != nil {
		var err error
		if data, err = telemetry.Redact(e.Data); err != nil {
			return fmt.Errorf("event %s: %w", e.Type, err)
		}
		if len(data) == 0 || data[0] != '{' {
			return fmt.Errorf("event %s: data is no object", e.Type)
		}
	}
	if len(data) > maxDataBytes {
		return fmt.Errorf("event %s: data of %d bytes is over the limit of %d", e.Type, len(data), maxDataBytes)
	}
	tx.Changed(e.Subject)
	tx.Enqueue(AppendedQueue, e.ID)
	return tx.Queue(ctx, `
		INSERT INTO events (id, type, subject, resource_version, org_id, project_id, correlation_id, traceparent, data, at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)`,
		e.ID, e.Type, e.Subject, e.ResourceVersion, db.OrNull(e.OrgID), db.OrNull(e.ProjectID), e.CorrelationID,
		e.Traceparent, data, e.At)
}

// SubjectQuery asks for the events of one resource.
type SubjectQuery struct {
	// OrgID empty means: the subject was checked by the caller.
	OrgID   string
	Subject string
	// After is the Cursor of the last event already seen; empty starts at the first.
	After string
	// Limit is at most MaxPage and one more; 0 means MaxPage.
	Limit int
}

// BySubject lists the events of one resource, oldest first, at once after their commit (it does not wait for the
// sequencer).
func BySubject(ctx context.Context, tx db.Tx, q SubjectQuery) ([]Event, error) {
	afterVersion, afterID := int64(-1), ""
	if q.After != "" {
		var err error
		if afterVersion, afterID, err = parseCursor(q.After); err != nil {
			return nil, err
		}
	}
	return db.Select(ctx, tx, scanEvent, `
		SELECT `+eventColumns+` FROM events
		WHERE subject = $1 AND ($2::UUID IS NULL OR org_id = $2::UUID)
		  AND (resource_version > $3 OR (resource_version = $3 AND id > $4::UUID))
		ORDER BY resource_version, id
		LIMIT $5`, q.Subject, db.OrNull(q.OrgID), afterVersion, db.OrNull(afterID), page(q.Limit))
}

func page(limit int) int {
	if limit <= 0 {
		return MaxPage
	}
	return min(limit, MaxPage+1)
}

// Cursor marks e's place in the listing of its subject.
func (e Event) Cursor() string { return strconv.FormatInt(e.ResourceVersion, 10) + "." + e.ID }

func parseCursor(s string) (version int64, id string, err error) {
	text, id, _ := strings.Cut(s, ".")
	version, err = strconv.ParseInt(text, 10, 64)
	if err != nil || version < 0 || !db.IsID(id) {
		return 0, "", fault.CursorInvalid()
	}
	return version, id, nil
}

// order puts events that are to be numbered into their order: by id, which follows the time they were made, but within
// one subject by the resource's version, because clocks of two hubs may disagree and versions cannot.
func order(events []Event) []Event {
	slices.SortStableFunc(events, func(a, b Event) int { return cmp.Compare(a.ID, b.ID) })
	slots := map[string][]int{}
	for i, e := range events {
		slots[e.Subject] = append(slots[e.Subject], i)
	}
	out := slices.Clone(events)
	for _, at := range slots {
		own := make([]Event, len(at))
		for i, slot := range at {
			own[i] = events[slot]
		}
		slices.SortStableFunc(own, func(a, b Event) int { return cmp.Compare(a.ResourceVersion, b.ResourceVersion) })
		for i, slot := range at {
			out[slot] = own[i]
		}
	}
	return out
}
