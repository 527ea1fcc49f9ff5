package httpapi

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// streamed are the CloudEvents of a stream.
func streamed(t *testing.T, text string) (events []event.CloudEvent) {
	t.Helper()
	for block := range strings.SplitSeq(strings.TrimSuffix(text, "\n\n"), "\n\n") {
		if block == "" || block == ":" {
			continue
		}
		lines := strings.Split(block, "\n")
		require.Len(t, lines, 3)
		var e event.CloudEvent
		require.NoError(t, json.Unmarshal([]byte(strings.TrimPrefix(lines[2], "data: ")), &e))
		require.Equal(t, []string{fmt.Sprint("id: ", e.Pos), "event: " + e.Type}, lines[:2])
		events = append(events, e)
	}
	return events
}

// Events are read by those who may read what they are of, after any position.
func TestLaw10EventsAreStreamedToThoseWhoMay(t *testing.T) {
	h := newHouse(t)
	orgID, projectID, boss := h.tenant(t, "acme")
	otherID, otherProject, stranger := h.tenant(t, "other")
	sa := h.must(t, boss, "POST", "/projects/"+projectID+"/service-accounts", "sa", `{"name":"CI","slug":"ci"}`, 201)
	robot := h.must(t, "", "POST", "/auth/service-account/token", "", mintBody(sa), 200).text("access_token")
	_, err := (&event.Sequencer{DB: h.d, Holder: "hub", Now: h.clock}).Number(t.Context())
	require.NoError(t, err)
	read := func(bearer, query string) []event.CloudEvent {
		return streamed(t, h.must(t, bearer, "GET", "/events"+query, "", "", 200).raw)
	}
	mine := read(boss, "")
	require.NotEmpty(t, mine)
	for n, e := range mine {
		require.NotContains(t, string(e.Data), otherID)
		require.True(t, n == 0 || e.Pos > mine[n-1].Pos)
	}
	require.NotEmpty(t, read(stranger, ""))
	for _, e := range read(stranger, "") {
		require.NotContains(t, string(e.Data), orgID)
	}
	require.Empty(t, read(robot, "?type=iam.service_account"), "an operator may not read service accounts")
	made := read(boss, "?type=iam.service_account.created&project_id="+projectID)
	require.Len(t, made, 1)
	require.Equal(t, sa.text("id"), made[0].Subject)
	require.Equal(t, made, read(boss, "?subject="+made[0].Subject+"&type=iam.service_account"))
	require.Empty(t, read(boss, "?type=iam.service"), "types begin with whole words")
	all := read(h.admin, "")
	require.Greater(t, len(all), len(mine))
	require.Equal(t, all[1:], read(h.admin, fmt.Sprintf("?after=%d", all[0].Pos)))
	require.Empty(t, read(boss, "?begin=now"))
	require.Equal(t, 404, h.ask(t, stranger, "GET", "/events?project_id="+projectID, "", "").status)
	require.Equal(t, 404, h.ask(t, robot, "GET", "/events?project_id="+otherProject, "", "").status)
	require.Equal(t, 401, h.ask(t, "", "GET", "/events", "", "").status)
	require.Equal(t, 400, h.ask(t, boss, "GET", "/events?after=nonsense", "", "").status)

	last := all[len(all)-1].Pos
	for _, kept := range []int64{3, last} { // the last time none is, and no new one has come
		require.NoError(t, db.WriteTx(t.Context(), h.d, func(tx db.Tx) error {
			_, err := tx.Exec(t.Context(), `DELETE FROM events WHERE pos <= $1`, kept)
			return err
		}))
		gone := h.ask(t, boss, "GET", fmt.Sprintf("/events?after=%d", kept-1), "", "")
		require.Equal(t, 409, gone.status)
		require.Equal(t, "events_expired", gone.text("code"))
		require.Equal(t, 200, h.ask(t, boss, "GET", fmt.Sprintf("/events?after=%d", kept), "", "").status)
	}
}

// told is a reader to which a test gives events.
type told struct {
	mu       sync.Mutex
	changed  chan struct{}
	next     []event.Numbered
	ended    bool
	behind   bool
	position int64
	replaced int
}

func (r *told) Read(context.Context) ([]event.Numbered, <-chan struct{}, bool, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	next := r.next
	r.next = nil
	return next, r.changed, r.ended, nil
}

func (r *told) FellBehind() bool { return r.behind }

func (r *told) Position() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.position
}

func (r *told) Replace(iam.Principal) { r.replaced++ }

// follow serves a followed stream to its end, and returns what was sent and how long it lasted.
func follow(r *told, again func() error) (text string, lasted time.Duration) {
	w, began := httptest.NewRecorder(), time.Now()
	_ = eventStream{
		reader: r, follow: true, request: httptest.NewRequest("GET", "/", nil),
		again: func(context.Context) (iam.Principal, error) { return iam.Principal{}, again() },
	}.VisitStreamEventsResponse(w)
	return w.Body.String(), time.Since(began)
}

func TestFollowedEventsComeAndEndWithTheCredential(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &told{changed: make(chan struct{}), position: 6}
		shared := []byte("event 7\n\nof other readers")
		time.AfterFunc(time.Second, func() {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.next = []event.Numbered{{Stream: shared[:len("event 7\n\n")]}, {Stream: []byte("event 8\n\n")}}
			r.position = 9 // the reader may not see the last
			before := r.changed
			r.changed = make(chan struct{})
			close(before)
		})
		checks := 0
		text, lasted := follow(r, func() error {
			if checks++; checks == 1 {
				return fault.New(fault.Unavailable, "database_unavailable", "The database does not answer.", nil)
			}
			if checks == 4 {
				return iam.ErrUnauthenticated()
			}
			return nil
		})
		require.Equal(t, 4*rightCheckEvery, lasted)
		require.Equal(t, 2, r.replaced, "the rights are read anew")
		require.Equal(t, "id: 6\n\nevent 7\n\nevent 8\n\nid: 9\n\nid: 9\n\n", text, "it says where it is")
		require.Equal(t, "event 7\n\nof other readers", string(shared))
		_, lasted = follow(&told{changed: make(chan struct{})}, func() error { return nil })
		require.Equal(t, eventStreamTime, lasted, "it ends in any case")
		text, lasted = follow(&told{changed: make(chan struct{}), ended: true}, func() error { return nil })
		require.Equal(t, ":\n\n", text, "nothing has ever happened")
		require.Zero(t, lasted, "the hub is stopping")
	})
}
