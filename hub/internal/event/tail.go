package event

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sort"
	"sync"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

const (
	// AppendedQueue is the work queue of events that wait for their position.
	AppendedQueue = "events.appended"
	// NumberedQueue is the work queue of events that have one and wait for their readers.
	NumberedQueue = "events.numbered"
	// tailEvents is how many of the newest events a hub keeps in memory for readers that follow.
	tailEvents = 1024
)

// Numbered is an event that has its position, with its form on the wire. All readers share it.
type Numbered struct {
	Event

	// JSON is the CloudEvent. It is a part of Stream, the CloudEvent in a text/event-stream.
	JSON, Stream []byte
}

// Tail holds the newest numbered events for any number of readers, so that one read of the database serves them all.
// Make it with NewTail, and run Pass whenever events were numbered.
type Tail struct {
	db *db.DB

	mu sync.Mutex
	// events are all numbered ones after the position floor, in order. The slice is only appended to, or replaced.
	events []Numbered
	floor  int64
	known  bool
	// next is closed when there are more events, or the tail is closed.
	next   chan struct{}
	closed bool
}

// NewTail returns a tail that is empty until its first pass.
func NewTail(d *db.DB) *Tail { return &Tail{db: d, next: make(chan struct{})} }

// Pass reads what was numbered since the last pass. The first one begins with the newest event.
func (t *Tail) Pass(ctx context.Context) error {
	after, known := t.last()
	if !known {
		newest, err := db.ReadTx(ctx, t.db, func(tx db.Tx) (pos int64, err error) {
			_, pos, err = Kept(ctx, tx)
			return pos, err
		})
		if err != nil {
			return err
		}
		t.begin(newest)
		return nil
	}
	for {
		more, err := After(ctx, t.db, after, "", "")
		if err != nil {
			return err
		}
		if len(more) > 0 {
			t.add(more)
			after = more[len(more)-1].Pos
		}
		if len(more) < MaxPage {
			return nil
		}
	}
}

func (t *Tail) last() (pos int64, known bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.events) == 0 {
		return t.floor, t.known
	}
	return t.events[len(t.events)-1].Pos, t.known
}

func (t *Tail) begin(newest int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.floor, t.known = newest, true
	t.wake()
}

func (t *Tail) add(more []Numbered) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.events = append(t.events, more...)
	if drop := len(t.events) - tailEvents; drop >= tailEvents {
		t.floor = t.events[drop-1].Pos
		t.events = slices.Clone(t.events[drop:])
	}
	t.wake()
}

func (t *Tail) wake() {
	if !t.closed {
		close(t.next)
		t.next = make(chan struct{})
	}
}

// Close wakes all readers, who find the tail closed.
func (t *Tail) Close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.closed {
		t.closed = true
		close(t.next)
	}
}

// View is what a tail has after a position.
type View struct {
	// Events are to be read and not changed.
	Events []Numbered
	// Floor is the position up to which the tail lacks events: where it is above the one that was asked for, they are in
	// the database.
	Floor int64
	// Known says that the tail has begun; until then all events are in the database.
	Known bool
	// Changed is closed once the view is out of date.
	Changed <-chan struct{}
	// Closed says that the hub is stopping.
	Closed bool
}

// After returns what the tail has after a position.
func (t *Tail) After(pos int64) View {
	t.mu.Lock()
	defer t.mu.Unlock()
	from := sort.Search(len(t.events), func(i int) bool { return t.events[i].Pos > pos })
	return View{
		Events: t.events[from:len(t.events):len(t.events)], Floor: t.floor, Known: t.known, Changed: t.next,
		Closed: t.closed,
	}
}

// After reads the numbered events after a position, at most MaxPage: those of an org and those of none where an org is
// named, and of those a project's where one is.
func After(ctx context.Context, d *db.DB, pos int64, orgID, projectID string) ([]Numbered, error) {
	var w db.Where
	if orgID != "" {
		w.And("(org_id = " + w.Arg(orgID) + " OR org_id IS NULL)")
	}
	w.Compare("project_id =", projectID)
	w.And("pos > " + w.Arg(pos))
	inOrder := " ORDER BY pos LIMIT " + w.Arg(MaxPage)
	events, err := db.Query(ctx, d, func(tx db.Tx) ([]Event, error) {
		return db.Select(ctx, tx, scanEvent, `SELECT `+eventColumns+` FROM events `+w.SQL()+inOrder, w.Args...)
	})
	if err != nil {
		return nil, err
	}
	return onWire(events)
}

// ByID reads a numbered event; nil where it is no longer kept.
func ByID(ctx context.Context, tx db.Tx, id string) (*Numbered, error) {
	events, err := db.Select(ctx, tx, scanEvent,
		`SELECT `+eventColumns+` FROM events WHERE id = $1 AND pos IS NOT NULL`, id)
	if err != nil || len(events) == 0 {
		return nil, err
	}
	one, err := onWire(events)
	if err != nil {
		return nil, err
	}
	return &one[0], nil
}

func onWire(events []Event) ([]Numbered, error) {
	out := make([]Numbered, 0, len(events))
	for _, e := range events {
		ce, err := e.CloudEvent()
		if err != nil {
			return nil, err
		}
		text, err := json.Marshal(ce)
		if err != nil {
			return nil, err
		}
		stream := fmt.Appendf(nil, "id: %d\nevent: %s\ndata: ", e.Pos, e.Type)
		begin := len(stream)
		stream = append(append(stream, text...), "\n\n"...)
		end := begin + len(text)
		out = append(out, Numbered{Event: e, JSON: stream[begin:end:end], Stream: stream})
	}
	return out, nil
}

// Kept are the positions of the oldest and the newest event that are kept. Without any, newest is the last position
// that was given, and oldest the next one.
func Kept(ctx context.Context, tx db.Tx) (oldest, newest int64, err error) {
	err = tx.QueryRow(ctx, `
		SELECT COALESCE((SELECT min(pos) FROM events), l.last_pos + 1), COALESCE((SELECT max(pos) FROM events), l.last_pos)
		FROM (SELECT COALESCE(max(last_pos), 0) AS last_pos FROM event_sequencer WHERE name = 'events') l`).
		Scan(&oldest, &newest)
	return oldest, newest, err
}
