package nodes_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestARemovedNodeIsCutOffAndRefused(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	l := n.Connect(hubtest.Hello("i1"))
	l.ExpectState(0)
	require.NoError(t, (&command.Service{DB: h.DB}).DrainNode(t.Context(), h.Admin("drain"), n.ID))
	require.NoError(t, h.RemoveNode(n.ID, command.RemoveNodeInput{Reason: "sold"}))
	<-l.Conn.Done()
	_, _, answer := n.SendHello(hubtest.Hello("i1"))
	require.Equal(t, "node_removed", answer.GetGoAway().GetReason())
}

// A lost node that reconnects gets an empty state and no lease, and its usage is posted.
func TestALostNodeThatReconnectsGetsAnEmptyState(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	i, member, lease := hubtest.Running(t, h, l)
	start := h.Now().Truncate(time.Microsecond)
	require.NoError(t, l.Conn.Close(0, "the machine is off"))
	h.Advance(5 * time.Minute)
	require.NoError(t, h.RemoveNode(n.ID, command.RemoveNodeInput{Lost: true}))
	h.Advance(10 * time.Minute)

	back := hubtest.Hello("i1")
	back.Epoch, back.Generation = 1, 2
	l = n.Connect(back)
	state, _ := l.ExpectState(0)
	require.Equal(t, uint64(3), state.GetGeneration())
	l.Report(3, &protocol.WorkloadStatus{
		MemberId: member, InstanceId: i.ID, Revision: 1,
		Status: protocol.WorkloadStatus_READY,
	})
	got := hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (instance.Instance, error) {
		return instance.Get(ctx, tx, h.Project.ID, i.ID)
	})
	require.Equal(t, lifecycle.Lifecycle{
		Status: lifecycle.Failed, Health: lifecycle.HealthUnhealthy,
		Reason: protocol.WorkloadStatus_NODE_LOST,
	}, got.Lifecycle, "what it says of the member is too late")
	require.Equal(t, fleet.Lost, h.NodeRow(n.ID).Status(h.Now()))
	require.NoError(t, h.Dispatcher.Renew(t.Context()))
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM leases`), "no further lease")

	last := hubtest.SessionSeconds(member, lease, start.Add(200*time.Second), 400)
	last.Final = true
	segments := n.Seal("i1", []*protocol.UsageRecord{hubtest.SessionSeconds(member, lease, start, 200)},
		[]*protocol.UsageRecord{last})
	stream := l.OpenUsage()
	for _, env := range append(segments, segments...) {
		require.Empty(t, hubtest.Upload(t, stream, env).GetNackReason())
	}
	closed := hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (at time.Time, err error) {
		return at, tx.QueryRow(ctx, `SELECT closed_at FROM subjects WHERE id = $1 AND settled_at IS NOT NULL`,
			member).Scan(&at)
	})
	// 3.60 EUR an hour are 1 000 nanos a millisecond: up to the loss, not beyond it, and not twice.
	require.Equal(t, closed.Sub(start).Microseconds(), revenue(h))
}

// What leaves a banned node is no lease: those that it has run out.
func TestABannedNodesLeasesAreNotRenewed(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	hubtest.Running(t, h, l)
	h.Advance(40 * time.Minute)
	require.NoError(t, h.Dispatcher.Renew(t.Context()))
	require.Equal(t, 2, hubtest.Count(h, `SELECT count(*) FROM leases`), "past its half-life a lease is renewed")
	require.NoError(t, (&command.Service{DB: h.DB}).BanNode(t.Context(), h.Admin("ban"), n.ID,
		"stolen"))
	h.Advance(2 * time.Hour)
	require.NoError(t, h.Dispatcher.Renew(t.Context()))
	require.Equal(t, 2, hubtest.Count(h, `SELECT count(*) FROM leases`))
}
