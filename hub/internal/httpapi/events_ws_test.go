package httpapi

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// dialEvents opens /events/ws of a house that listens.
func dialEvents(t *testing.T, url, bearer, query string) (*websocket.Conn, *http.Response) {
	t.Helper()
	conn, res, err := websocket.Dial(t.Context(), url+"/api/v1/events/ws"+query, &websocket.DialOptions{
		HTTPHeader: http.Header{"Authorization": {"Bearer " + bearer}},
	})
	if err == nil {
		t.Cleanup(func() { _ = conn.CloseNow() })
	}
	return conn, res
}

func nextEvent(t *testing.T, conn *websocket.Conn) (e event.CloudEvent) {
	t.Helper()
	kind, text, err := conn.Read(t.Context())
	require.NoError(t, err)
	require.Equal(t, websocket.MessageText, kind)
	require.NoError(t, json.Unmarshal(text, &e))
	return e
}

// TestLaw10EventsGoOverAWebSocketToThoseWhoMay reads the same events as the stream of server-sent ones, from the same
// positions and through the same filters.
func TestLaw10EventsGoOverAWebSocketToThoseWhoMay(t *testing.T) {
	h := newHouse(t)
	orgID, projectID, boss := h.tenant(t, "acme")
	otherID, _, stranger := h.tenant(t, "other")
	number := func() {
		_, err := (&event.Sequencer{DB: h.d, Holder: "hub", Now: h.clock}).Number(t.Context())
		require.NoError(t, err)
		require.NoError(t, h.tail.Pass(t.Context()))
	}
	number()
	server := httptest.NewServer(h.unchecked)
	t.Cleanup(server.Close)
	all := streamed(t, h.must(t, boss, "GET", "/events", "", "", 200).raw)
	conn, _ := dialEvents(t, server.URL, boss, "?begin=oldest")
	for _, want := range all {
		require.Equal(t, want, nextEvent(t, conn))
	}
	resumed, _ := dialEvents(t, server.URL, boss, "?after="+strconv.FormatInt(all[0].Pos, 10)+"&type=iam.project")
	require.Equal(t, "iam.project.created", nextEvent(t, resumed).Type)
	fromNow, _ := dialEvents(t, server.URL, stranger, "")
	happen := func(org string) string {
		id := db.NewID()
		require.NoError(t, db.WriteTx(t.Context(), h.d, func(tx db.Tx) error {
			return event.Append(t.Context(), tx, event.Event{
				Type: "iam.project.created", Subject: id, OrgID: org, ResourceVersion: 1, At: h.clock(),
			})
		}))
		number()
		return id
	}
	happen(orgID)
	theirs := happen(otherID)
	require.Equal(t, theirs, nextEvent(t, fromNow).Subject, "what happened before, and to others, is left out")

	for bearer, status := range map[string]int{"": 401, "nonsense": 401} {
		_, res := dialEvents(t, server.URL, bearer, "")
		require.Equal(t, status, res.StatusCode)
	}
	_, res := dialEvents(t, server.URL, stranger, "?project_id="+projectID)
	require.Equal(t, 404, res.StatusCode)
	require.Equal(t, "upgrade_missing", h.must(t, boss, "GET", "/events/ws", "", "", 400).text("code"))
}

// socket serves a followed WebSocket, and returns its client's side.
func socket(t *testing.T, e eventSocket) (client *websocket.Conn, served <-chan error) {
	t.Helper()
	done := make(chan error, 1)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		e.request = r
		done <- e.VisitFollowEventsResponse(w)
	}))
	t.Cleanup(server.Close)
	client, _, err := websocket.Dial(t.Context(), server.URL, nil)
	require.NoError(t, err)
	client.SetReadLimit(-1)
	t.Cleanup(func() { _ = client.CloseNow() })
	return client, done
}

func TestAWebSocketEndsWithAReason(t *testing.T) {
	again := func(err error) func(context.Context) (iam.Principal, error) {
		return func(context.Context) (iam.Principal, error) { return iam.Principal{}, err }
	}
	for reason, c := range map[string]struct {
		e    eventSocket
		code websocket.StatusCode
	}{
		closeCredentialEnded: {eventSocket{
			reader: &told{changed: make(chan struct{})}, again: again(iam.ErrUnauthenticated()),
			checkEvery: time.Millisecond,
		}, websocket.StatusPolicyViolation},
		closeTooSlow: {eventSocket{
			reader: &told{changed: make(chan struct{}), behind: true}, again: again(nil),
		}, websocket.StatusPolicyViolation},
		closeAgain: {eventSocket{
			reader: &told{changed: make(chan struct{}), ended: true}, again: again(nil),
		}, websocket.StatusGoingAway},
	} {
		c.e.log = slog.New(slog.DiscardHandler)
		client, served := socket(t, c.e)
		_, _, err := client.Read(t.Context())
		require.Equal(t, c.code, websocket.CloseStatus(err), reason)
		require.ErrorContains(t, err, reason)
		require.NoError(t, <-served)
	}
}

// A caller whose credential ends does not read all that is kept before anybody notices.
func TestTheCredentialIsCheckedWhileOldEventsAreSent(t *testing.T) {
	again := func(context.Context) (iam.Principal, error) { return iam.Principal{}, iam.ErrUnauthenticated() }
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, eventStream{
		reader: &told{}, follow: true, again: again, checkEvery: time.Millisecond,
		request: httptest.NewRequestWithContext(ctx, "GET", "/", nil),
	}.VisitStreamEventsResponse(httptest.NewRecorder()))
	require.NoError(t, ctx.Err())
	client, served := socket(t, eventSocket{
		reader: &told{}, again: again, checkEvery: time.Millisecond, log: slog.New(slog.DiscardHandler),
	})
	_, _, err := client.Read(ctx)
	require.ErrorContains(t, err, closeCredentialEnded)
	require.NoError(t, <-served)
}

// A client that takes nothing costs one message that is on its way, and not for long.
func TestAWebSocketThatTakesNothingIsCutOff(t *testing.T) {
	big := event.Numbered{JSON: []byte(strings.Repeat("x", 64<<20))}
	r := &told{changed: make(chan struct{}), next: []event.Numbered{big}}
	_, served := socket(t, eventSocket{reader: r, writeTime: 50 * time.Millisecond, log: slog.New(slog.DiscardHandler)})
	require.ErrorIs(t, <-served, context.DeadlineExceeded)
}
