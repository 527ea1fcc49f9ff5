package nodelink_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/dispatch"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/protocol"
)

// TestLaw01WhatIsSentIsSignedAndAddressed: what the hub sends verifies as the node verifies it, is bound to this node
// and its key, carries the publisher's own envelope, and a state for another node is of no use.
func TestLaw01WhatIsSentIsSignedAndAddressed(t *testing.T) {
	h := newHub(t)
	h.publish()
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	i := h.launch()
	_, push := l.state(1)

	stranger := h.enrol()
	_, err := protocol.VerifyState(push.GetEnvelope(), n.bundle, stranger.me)
	require.Equal(t, protocol.RefusalWrongNode, protocol.RefusalOf(err))
	sameIDOtherKey := stranger.me
	sameIDOtherKey.ID = n.id
	_, err = protocol.VerifyState(push.GetEnvelope(), n.bundle, sameIDOtherKey)
	require.Equal(t, protocol.RefusalWrongNode, protocol.RefusalOf(err))

	w := &protocol.Workload{}
	require.NoError(t, proto.Unmarshal(push.GetParts()[0], w))
	_, publisher, err := protocol.VerifyPublisher(w.GetManifest(), w.GetDelegation(), n.bundle, time.Now())
	require.NoError(t, err)
	require.Equal(t, []string{"apps/"}, publisher.RepositoryPrefixes)

	// What has left the state is gone from what is sent.
	h.decommission(i.ID)
	l.state(0)
}

// TestLaw02GenerationsOnlyGrow: the same content makes no new generation, other content makes exactly one, and the
// bytes of a number never change, whoever asks and however often.
func TestLaw02GenerationsOnlyGrow(t *testing.T) {
	h := newHub(t)
	h.publish()
	n := h.enrol()
	l := n.connect(hello("i1"))
	first, _ := l.state(0)
	require.Equal(t, uint64(1), first.GetGeneration())
	h.launch()
	second, push := l.state(1)
	require.Equal(t, uint64(2), second.GetGeneration())
	newest := func() uint64 {
		return tx(h, func(ctx context.Context, tx db.Tx) (uint64, error) { return dispatch.NewestGeneration(ctx, tx, n.id) })
	}
	l.report(2)
	for range 3 {
		require.NoError(t, h.dispatcher.SyncAll(t.Context()))
	}
	require.Equal(t, uint64(2), newest(), "the same content is the same generation")

	// The node says hello with nothing: the very same bytes come again.
	again := n.connect(hello("i2"))
	_, pushAgain := again.state(1)
	require.True(t, proto.Equal(push.GetEnvelope(), pushAgain.GetEnvelope()))
}

// TestLaw02NodeWithMoreThanTheHubIsGoneAbove: a node holds a higher number than a restored hub, or other content under
// the same number; it can be brought on only by a still higher one.
func TestLaw02NodeWithMoreThanTheHubIsGoneAbove(t *testing.T) {
	h := newHub(t)
	n := h.enrol()
	n.connect(hello("i1")).state(0)

	ahead := hello("i1")
	ahead.Epoch, ahead.Generation, ahead.StateSha256 = 1, 41, sha([]byte("unknown here"))
	l := n.connect(ahead)
	require.False(t, l.welcome.GetNewIncarnation(), "a hub that is behind is no fault of the node's store")
	state, _ := l.state(0)
	require.Equal(t, uint64(42), state.GetGeneration())
	l.report(42)

	conflict := hello("i1")
	conflict.Epoch, conflict.Generation, conflict.StateSha256 = 1, 42, sha([]byte("other content"))
	l = n.connect(conflict)
	state, _ = l.state(0)
	require.Equal(t, uint64(43), state.GetGeneration())
	l.report(43)

	l.send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Nack{Nack: &protocol.Nack{
		Document: "state", Epoch: 1, Generation: 43, Reason: protocol.RefusalConflict,
	}}})
	state, _ = l.state(0)
	require.Equal(t, uint64(44), state.GetGeneration())
}

func TestLaw02StoreThatFellBehindTakesANewIncarnation(t *testing.T) {
	h := newHub(t)
	n := h.enrol()
	l := n.connect(hello("i1"))
	state, push := l.state(0)
	l.report(state.GetGeneration())
	require.Empty(t, upload(t, l.usage(), n.segments("i1", nil)[0]).GetNackReason())

	whole := hello("i1")
	whole.Epoch, whole.Generation, whole.StateSha256, whole.LastSegment = 1, state.GetGeneration(),
		sha(push.GetEnvelope().GetPayload()), 1
	l = n.connect(whole)
	require.False(t, l.welcome.GetNewIncarnation())
	require.Equal(t, uint64(1), l.welcome.GetPostedSegment())

	lost := proto.CloneOf(whole)
	lost.LastSegment = 0
	require.True(t, n.connect(lost).welcome.GetNewIncarnation(), "a segment that the hub has is unknown to the store")
	require.False(t, n.connect(hello("i2")).welcome.GetNewIncarnation())
}

// running brings an instance to running and gives its member's id and the lease.
func running(t *testing.T, h *hub, l *line) (instance.Instance, string, *protocol.Lease) {
	t.Helper()
	l.leases = nil
	i := h.launch()
	state, _ := l.state(1)
	lease := l.pushedLeases().GetLeases()[0]
	member := i.Members[0].ID
	l.report(state.GetGeneration(), &protocol.WorkloadStatus{
		MemberId: member, InstanceId: i.ID, Revision: 1, Status: "ready", StartedAt: timestamppb.New(h.now()),
		ReadyAt:   timestamppb.New(h.now()),
		Endpoints: []*protocol.PublishedEndpoint{{Name: "http", Protocol: "http", Host: "127.0.0.1", Port: 20000}},
	})
	return i, member, lease
}

func seconds(member string, lease *protocol.Lease, from time.Time, n int64) *protocol.UsageRecord {
	return &protocol.UsageRecord{
		MemberId: member, Revision: 1, Meter: protocol.MeterSessionSeconds, Quantity: n * 1_000_000, RunId: "r1",
		LeaseNo:   lease.GetLeaseNo(),
		StartedAt: timestamppb.New(from), EndedAt: timestamppb.New(from.Add(time.Duration(n) * time.Second)),
	}
}

func revenue(h *hub) int64 {
	h.t.Helper()
	return tx(h, func(ctx context.Context, tx db.Tx) (n int64, err error) {
		return n,
			tx.QueryRow(ctx, `SELECT (COALESCE((SELECT sum(amount_nanos) FROM entries WHERE account = 'platform:revenue'), 0)
			+ COALESCE((SELECT sum(collected_nanos - host_nanos + written_off_nanos) FROM pending_postings), 0))::INT8`).Scan(&n)
	})
}

// TestLaw05SegmentsAreBilledOnceInAnyOrder: duplicated, replayed after a reconnect, out of order and raced, every
// second is posted once; the acknowledgement names only what is posted without a gap.
func TestLaw05SegmentsAreBilledOnceInAnyOrder(t *testing.T) {
	h := newHub(t)
	h.publish()
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	_, member, lease := running(t, h, l)
	start := h.now().Truncate(time.Microsecond)
	h.forward(10 * time.Minute)
	segments := n.segments("i1",
		[]*protocol.UsageRecord{seconds(member, lease, start, 30)},
		[]*protocol.UsageRecord{seconds(member, lease, start.Add(30*time.Second), 30)},
		[]*protocol.UsageRecord{seconds(member, lease, start.Add(60*time.Second), 30)},
		[]*protocol.UsageRecord{seconds(member, lease, start.Add(90*time.Second), 30)},
	)
	stream := l.usage()
	for _, step := range []struct {
		segment int
		posted  uint64
	}{{0, 1}, {0, 1}, {2, 1}, {2, 1}, {3, 1}, {1, 4}, {0, 4}, {3, 4}} {
		ack := upload(t, stream, segments[step.segment])
		require.Empty(t, ack.GetNackReason())
		require.Equal(t, step.posted, ack.GetPostedSegment(), "after segment %d", step.segment+1)
	}
	require.Equal(t, 4, count(h, `SELECT count(*) FROM usage_recent WHERE meter = 'session_seconds'`))
	require.Equal(t, 0, count(h, `SELECT count(*) FROM usage_ahead`), "the gap is closed and forgotten")
	// 3.60 EUR an hour are 1 000 000 nanos a second.
	require.Equal(t, int64(120*1_000_000), revenue(h))

	// After a reconnect both streams send everything again, at the same time.
	again := n.connect(hello("i1"))
	again.state(1)
	done := make(chan *protocol.UsageAck, 2)
	for range 2 {
		s := again.usage()
		go func() {
			var last *protocol.UsageAck
			for _, env := range segments {
				if s.Send(&protocol.UsageUpload{Segment: env}) != nil {
					break
				}
				last = &protocol.UsageAck{}
				if s.Receive(last, protocol.MaxControlBytes) != nil {
					last = nil
					break
				}
			}
			done <- last
		}()
	}
	for range 2 {
		ack := <-done
		require.NotNil(t, ack)
		require.Equal(t, uint64(4), ack.GetPostedSegment())
		require.Equal(t, "i1", ack.GetIncarnation())
	}
	require.Equal(t, int64(120*1_000_000), revenue(h))
}

func TestLaw05AChainThatDoesNotFitIsRefusedAndShown(t *testing.T) {
	h := newHub(t)
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	stream := l.usage()
	good := n.segments("i1", nil, nil, nil)
	fork := n.segments("i1", []*protocol.UsageRecord{{MemberId: db.NewID(), Meter: protocol.MeterSessionSeconds}}, nil,
		nil)
	require.Empty(t, upload(t, stream, good[0]).GetNackReason())
	require.Equal(t, "chain_broken", upload(t, stream, fork[0]).GetNackReason(), "another content under a posted number")
	require.Equal(t, "chain_broken", upload(t, stream, fork[1]).GetNackReason(), "does not follow what was posted")
	require.Empty(t, upload(t, stream, good[2]).GetNackReason())
	require.Equal(t, "chain_broken", upload(t, stream, fork[2]).GetNackReason(), "another content under a number beyond "+
		"the gap")
	ack := upload(t, stream, good[1])
	require.Empty(t, ack.GetNackReason())
	require.Equal(t, uint64(3), ack.GetPostedSegment())
	require.Positive(t,
		count(h, `SELECT count(*) FROM node_refusals WHERE node_id = $1 AND document = 'usage' AND reason = 'chain_broken'`,
			n.id))

	other := h.enrol()
	require.Equal(t, protocol.RefusalSignature, upload(t, stream, other.segments("i1", nil)[0]).GetNackReason(),
		"signed by another node")
	stolen := *other
	stolen.key = n.key
	require.Equal(t, protocol.RefusalWrongNode, upload(t, stream, stolen.segments("i1", nil)[0]).GetNackReason())
}

// TestLaw06MoneyBalancesThroughIntake: whatever comes in, the entries of every posting sum to zero.
func TestLaw06MoneyBalancesThroughIntake(t *testing.T) {
	h := newHub(t)
	h.publish()
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	_, member, lease := running(t, h, l)
	start := h.now().Truncate(time.Microsecond)
	h.forward(10 * time.Minute)
	segments := n.segments("i1",
		[]*protocol.UsageRecord{seconds(member, lease, start, 7), seconds(member, lease, start.Add(7*time.Second), 13)},
		// Nobody's, beyond the lease, in the future, the same time again under another name: into suspense.
		[]*protocol.UsageRecord{
			seconds(db.NewID(), lease, start, 100), seconds(member, lease, start.Add(24*time.Hour), 50),
			seconds(member, lease, start, 20),
		},
	)
	stream := l.usage()
	for _, env := range append(segments, segments...) {
		require.Empty(t, upload(t, stream, env).GetNackReason())
	}
	require.Equal(t, 0,
		count(h,
			`SELECT count(*) FROM (SELECT posting_id FROM entries GROUP BY posting_id, currency
				HAVING sum(amount_nanos) <> 0) x`))
	require.Equal(t, int64(20*1_000_000), revenue(h), "only what was leased, elapsed and the member's own")
}

// TestLaw08NodeChangesHaveEventAndAuditRow: each change of a node through this way leaves exactly one event and one
// audit row.
func TestLaw08NodeChangesHaveEventAndAuditRow(t *testing.T) {
	h := newHub(t)
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	l.send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Nack{Nack: &protocol.Nack{
		Document:   "state",
		Generation: 9, Reason: protocol.RefusalSignature,
	}}})
	l.report(1)
	h.forward(time.Hour)
	require.NoError(t, h.nodes.Sweep(t.Context()))
	events := count(h, `SELECT count(*) FROM events WHERE subject = $1`, n.id)
	require.Equal(t, 4, events, "enrolled, online, document_refused, offline")
	require.Equal(t, events, count(h, `SELECT count(*) FROM audit_rows WHERE resource_id = $1`, n.id))
	require.Equal(t, events, count(h, `SELECT count(DISTINCT resource_version) FROM events WHERE subject = $1`, n.id),
		"each has its own number")
}
