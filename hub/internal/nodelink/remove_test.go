package nodelink_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/protocol"
)

func (h *hub) removeNode(nodeID string, in command.RemoveNodeInput) error {
	return (&command.Service{DB: h.d, ShutOut: h.server.Disconnect, EnqueueNode: h.dispatcher.Enqueue}).RemoveNode(
		h.t.Context(),
		h.admin("remove"+db.NewID()), nodeID, in)
}

func TestARemovedNodeIsCutOffAndRefused(t *testing.T) {
	h := newHub(t)
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	require.NoError(t, (&command.Service{DB: h.d}).DrainNode(t.Context(), h.admin("drain"), n.id))
	require.NoError(t, h.removeNode(n.id, command.RemoveNodeInput{Reason: "sold"}))
	<-l.conn.Done()
	_, _, answer := n.say(hello("i1"))
	require.Equal(t, "node_removed", answer.GetGoAway().GetReason())
}

// A lost node that comes back is told to hold nothing, gets no lease, and hands over what it measured.
func TestALostNodeThatComesBackIsEmptiedAndHeardOnce(t *testing.T) {
	h := newHub(t)
	h.publish()
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	i, member, lease := running(t, h, l)
	start := h.now().Truncate(time.Microsecond)
	require.NoError(t, l.conn.Close(0, "the machine is off"))
	h.forward(5 * time.Minute)
	require.NoError(t, h.removeNode(n.id, command.RemoveNodeInput{Lost: true}))
	h.forward(10 * time.Minute)

	back := hello("i1")
	back.Epoch, back.Generation = 1, 2
	l = n.connect(back)
	state, _ := l.state(0)
	require.Equal(t, uint64(3), state.GetGeneration())
	l.report(3, &protocol.WorkloadStatus{MemberId: member, InstanceId: i.ID, Revision: 1, Status: "ready"})
	got := tx(h, func(ctx context.Context, tx db.Tx) (instance.Instance, error) {
		return instance.Get(ctx, tx, h.project.ID, i.ID)
	})
	require.Equal(t, instance.Lifecycle{
		Status: instance.Failed, Health: instance.HealthUnhealthy,
		Reason: instance.ReasonNodeLost,
	}, got.Lifecycle, "what it says of the member is too late")
	require.Equal(t, fleet.Lost, h.node(n.id).Status(h.now()))
	require.NoError(t, h.dispatcher.Renew(t.Context()))
	require.Equal(t, 1, count(h, `SELECT count(*) FROM leases`), "no further lease")

	last := seconds(member, lease, start.Add(200*time.Second), 400)
	last.Final = true
	segments := n.segments("i1", []*protocol.UsageRecord{seconds(member, lease, start, 200)},
		[]*protocol.UsageRecord{last})
	stream := l.usage()
	for _, env := range append(segments, segments...) {
		require.Empty(t, upload(t, stream, env).GetNackReason())
	}
	closed := tx(h, func(ctx context.Context, tx db.Tx) (at time.Time, err error) {
		return at, tx.QueryRow(ctx, `SELECT closed_at FROM subjects WHERE id = $1 AND settled_at IS NOT NULL`,
			member).Scan(&at)
	})
	// 3.60 EUR an hour are 1 000 nanos a millisecond: up to the loss, not beyond it, and not twice.
	require.Equal(t, closed.Sub(start).Microseconds(), revenue(h))
}

// What leaves a banned node is no lease: those that it has run out.
func TestABannedNodesLeasesAreNotRenewed(t *testing.T) {
	h := newHub(t)
	h.publish()
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	running(t, h, l)
	h.forward(40 * time.Minute)
	require.NoError(t, h.dispatcher.Renew(t.Context()))
	require.Equal(t, 2, count(h, `SELECT count(*) FROM leases`), "past its half-life a lease is renewed")
	require.NoError(t, (&command.Service{DB: h.d, ShutOut: h.server.Disconnect}).BanNode(t.Context(), h.admin("ban"), n.id,
		"stolen"))
	h.forward(2 * time.Hour)
	require.NoError(t, h.dispatcher.Renew(t.Context()))
	require.Equal(t, 2, count(h, `SELECT count(*) FROM leases`))
}
