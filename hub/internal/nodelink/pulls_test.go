package nodelink_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/hub/internal/query"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestAPullIsShownWhileItLastsAndOnlyItsPhasesAreStored(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	i := h.Launch()
	state, _ := l.ExpectState(1)
	require.Eventually(t, func() bool { return h.NodeRow(n.ID).AcceptedGeneration == state.GetGeneration() }, time.Minute,
		time.Millisecond)
	require.NoError(t, db.WriteTx(t.Context(), h.DB, func(tx db.Tx) error {
		_, err := tx.Exec(t.Context(), `UPDATE instance_operations SET traceparent = $1 WHERE instance_id = $2`,
			"00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01", i.ID)
		return err
	}))
	member := i.Members[0]
	q := &query.Service{DB: h.DB, ImagePull: h.Link.ImagePull}
	read := func(w query.Watch) query.Instance {
		t.Helper()
		got, err := q.Instance(t.Context(), h.User, h.Project.ID, i.ID, w)
		require.NoError(t, err)
		return got
	}
	say := func(s *hubtest.Session, done uint64) {
		s.Send(&protocol.NodeMessage{Message: &protocol.NodeMessage_PullProgress{PullProgress: &protocol.PullProgress{
			Pulls: []*protocol.ImagePull{{
				MemberId: member.ID, Phase: protocol.ImagePull_FETCHING, DoneBytes: done, TotalBytes: 100,
			}},
		}}})
	}
	before, row := read(query.Watch{}), h.NodeRow(n.ID)
	require.Empty(t, before.Pulls)

	answered := make(chan query.Instance, 1)
	go func() { answered <- read(query.Watch{After: before.ResourceVersion, Wait: time.Minute}) }()
	var got query.Instance
	for done, waiting := uint64(1), true; waiting; done++ {
		say(l, min(done, 100))
		select {
		case got = <-answered:
			waiting = false
		case <-time.After(200 * time.Millisecond):
		}
	}
	require.Equal(t, protocol.ImagePull_FETCHING, got.Pulls[member.ID].GetPhase())
	require.NotZero(t, got.Pulls[member.ID].GetDoneBytes())
	require.Equal(t, before.ResourceVersion, got.ResourceVersion)
	require.Equal(t, row, h.NodeRow(n.ID))

	// Another node's word about the member counts nothing.
	other := h.Enroll()
	session := other.Connect(hubtest.Hello("i1"))
	session.ExpectState(0)
	say(session, 77)
	stored := func() bool { return h.Link.ImagePull(other.ID, member.ID) != nil }
	require.Eventually(t, stored, time.Minute, time.Millisecond)
	require.NotEqual(t, uint64(77), read(query.Watch{}).Pulls[member.ID].GetDoneBytes())

	// One event for the phase, however many messages, and none of the other node's.
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM events WHERE type = 'apps.instance.image_pull'`))
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM events WHERE type = 'apps.instance.image_pull'
		AND subject = $1 AND data->>'phase' = 'fetching' AND data->>'member_id' = $2 AND data->>'total_bytes' = '100'
		AND traceparent LIKE '00-0af7651916cd43dd8448eb211c80319c-%'`, i.ID, member.ID))

	l.Send(&protocol.NodeMessage{Message: &protocol.NodeMessage_PullProgress{PullProgress: &protocol.PullProgress{}}})
	require.Eventually(t, func() bool { return len(read(query.Watch{}).Pulls) == 0 }, time.Minute, 5*time.Millisecond)
}
