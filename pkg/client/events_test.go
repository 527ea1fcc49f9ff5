package client_test

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/client"
)

// A followed stream that breaks goes on after the last event that was handled; the handler's error ends it.
func TestFollowedEventsGoOnWhereTheyBroke(t *testing.T) {
	var asked []string
	hub := open(t, func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.Header.Get("Last-Event-ID")+" "+r.URL.RawQuery)
		w.Header().Set("Content-Type", "text/event-stream")
		from := min(len(asked), 2)
		if len(asked) == 2 {
			_, _ = fmt.Fprint(w, "id: 3\ndata: {\"pos\":") // one that is cut changes nothing
			return
		}
		for n := from; n < from+2; n++ {
			_, _ = fmt.Fprintf(w, ":\n\nid: %d\nevent: iam.org.created\ndata: {\"pos\":%d}\n\n", n, n)
		}
	})
	enough := errors.New("enough")
	var got []int64
	err := client.Events(t.Context(), hub, client.StreamEventsParams{Follow: true}, func(e client.Event) error {
		if got = append(got, e.Pos); e.Pos == 3 {
			return enough
		}
		return nil
	})
	require.ErrorIs(t, err, enough)
	require.Equal(t, []int64{1, 2, 2, 3}, got)
	require.Equal(t, []string{" follow=true", "2 follow=true", "2 follow=true"}, asked)
	ignore := func(client.Event) error { return nil }
	err = client.Events(t.Context(), hub, client.StreamEventsParams{}, ignore)
	require.NoError(t, err, "one that does not follow ends")
}

// Without an event, a stream goes on where the hub said that it was; an event that has come in part has not come.
func TestFollowedEventsGoOnWhereTheHubSaidThatTheyWere(t *testing.T) {
	var asked []string
	hub := open(t, func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.Header.Get("Last-Event-ID"))
		if len(asked) == 3 {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = fmt.Fprintf(w, "id: %d\n\n:\n\nid: 9\nevent: iam.org.created\n", 6+len(asked))
	})
	ignore := func(client.Event) error { return nil }
	require.Error(t, client.Events(t.Context(), hub, client.StreamEventsParams{Follow: true}, ignore))
	require.Equal(t, []string{"", "7", "8"}, asked)
}

// What never passes ends a followed stream: the same line would come again.
func TestALineThatIsTooLongEndsAFollowedStream(t *testing.T) {
	asked := 0
	hub := open(t, func(w http.ResponseWriter, _ *http.Request) {
		asked++
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = fmt.Fprintf(w, "id: 1\ndata: {\"pos\":1,\"type\":\"%s\"}\n\n", strings.Repeat("x", 2<<20))
	})
	ignore := func(client.Event) error { return nil }
	err := client.Events(t.Context(), hub, client.StreamEventsParams{Follow: true}, ignore)
	require.ErrorContains(t, err, "a line has more than")
	require.Equal(t, 1, asked)
}
