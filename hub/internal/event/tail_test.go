package event_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/event"
)

func number(t *testing.T, d *db.DB) {
	t.Helper()
	_, err := (&event.Sequencer{DB: d, Holder: "hub", Now: func() time.Time { return at(0) }}).Number(t.Context())
	require.NoError(t, err)
}

func TestTheTailHasWhatIsNumberedAfterItBegan(t *testing.T) {
	d := dbtest.New(t)
	tail := event.NewTail(d)
	happen := func(subject string) {
		appendEvents(t, d, event.Event{Type: "iam.org.created", Subject: subject, OrgID: db.NewID(), At: at(0)})
		number(t, d)
	}
	happen("before")
	require.NoError(t, tail.Pass(t.Context()))
	v := tail.After(1)
	require.Empty(t, v.Events)
	require.EqualValues(t, 1, v.Floor)
	happen("a")
	happen("b")
	select {
	case <-v.Changed:
		require.Fail(t, "nothing has read the events yet")
	default:
	}
	require.NoError(t, tail.Pass(t.Context()))
	<-v.Changed
	v = tail.After(2)
	require.Len(t, v.Events, 1)
	require.Equal(t, "b", v.Events[0].Subject)
	require.Contains(t, string(v.Events[0].JSON), `"pos":3`)
	require.Equal(t, "id: 3\nevent: iam.org.created\ndata: "+string(v.Events[0].JSON)+"\n\n", string(v.Events[0].Stream))
	require.Empty(t, tail.After(3).Events)
	tail.Close()
	<-v.Changed
	require.True(t, tail.After(3).Closed)
}

// A hub keeps a bounded number of events in memory; the others are in the database.
func TestTheTailIsBounded(t *testing.T) {
	d := dbtest.New(t)
	tail := event.NewTail(d)
	require.NoError(t, tail.Pass(t.Context()))
	const n = 2100
	for from := 0; from < n; from += 700 {
		var events []event.Event
		for i := from; i < from+700; i++ {
			events = append(events, event.Event{Type: "iam.org.created", Subject: fmt.Sprint(i), OrgID: db.NewID(), At: at(i)})
		}
		appendEvents(t, d, events...)
		number(t, d)
		require.NoError(t, tail.Pass(t.Context()))
	}
	floor := tail.After(0).Floor
	require.Positive(t, floor)
	require.Len(t, tail.After(floor).Events, int(n-floor))
	require.Less(t, len(tail.After(floor).Events), 2048)
	stored, err := event.After(t.Context(), d, 0, "", "")
	require.NoError(t, err)
	require.EqualValues(t, 1, stored[0].Pos)
	stored, err = event.After(t.Context(), d, 0, stored[5].OrgID, "")
	require.NoError(t, err)
	require.Len(t, stored, 1)
}
