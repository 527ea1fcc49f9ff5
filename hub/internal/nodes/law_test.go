package nodes_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/dispatch"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/protocol"
)

// TestLaw01WhatIsSentIsSignedAndAddressed: what the hub sends verifies as the node verifies it, is bound to this node
// and its key, carries the publisher's own envelope, and a state for another node is of no use.
func TestLaw01WhatIsSentIsSignedAndAddressed(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	i := h.Launch()
	_, push := l.ExpectState(1)

	stranger := h.Enroll()
	_, err := protocol.VerifyState(push.GetEnvelope(), n.Bundle, stranger.Identity)
	require.Equal(t, protocol.Nack_WRONG_NODE, protocol.RefusalOf(err))
	sameIDOtherKey := stranger.Identity
	sameIDOtherKey.ID = n.ID
	_, err = protocol.VerifyState(push.GetEnvelope(), n.Bundle, sameIDOtherKey)
	require.Equal(t, protocol.Nack_WRONG_NODE, protocol.RefusalOf(err))

	w := &protocol.Workload{}
	require.NoError(t, proto.Unmarshal(push.GetParts()[0], w))
	_, publisher, err := protocol.VerifyPublisher(w.GetManifest(), w.GetDelegation(), n.Bundle, time.Now())
	require.NoError(t, err)
	require.Equal(t, []string{"apps/"}, publisher.RepositoryPrefixes)

	// What has left the state is gone from what is sent.
	h.Decommission(i.ID)
	l.ExpectState(0)
}

// TestLaw02GenerationsOnlyGrow: the same content makes no new generation, other content makes exactly one, and the
// bytes of a number never change, however often it is synced.
func TestLaw02GenerationsOnlyGrow(t *testing.T) {
	h := hubtest.New(t)
	h.PublishDemo()
	n := h.Enroll()
	l := n.Connect(hubtest.Hello("i1"))
	first, _ := l.ExpectState(0)
	require.Equal(t, uint64(1), first.GetGeneration())
	h.Launch()
	second, push := l.ExpectState(1)
	require.Equal(t, uint64(2), second.GetGeneration())
	newest := func() uint64 {
		return hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (uint64, error) {
			return dispatch.NewestGeneration(ctx, tx, n.ID)
		})
	}
	l.Report(2)
	for range 3 {
		require.NoError(t, h.Dispatcher.SyncAll(t.Context()))
	}
	require.Equal(t, uint64(2), newest(), "the same content is the same generation")

	// The node says hello with nothing: the very same bytes come again.
	again := n.Connect(hubtest.Hello("i2"))
	_, pushAgain := again.ExpectState(1)
	require.True(t, proto.Equal(push.GetEnvelope(), pushAgain.GetEnvelope()))
}

// TestLaw02NodeWithMoreThanTheHubIsGoneAbove: a node holds a higher number than a restored hub, or other content under
// the same number; only a still higher one can follow.
func TestLaw02NodeWithMoreThanTheHubIsGoneAbove(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	n.Connect(hubtest.Hello("i1")).ExpectState(0)

	ahead := hubtest.Hello("i1")
	ahead.Epoch, ahead.Generation, ahead.StateSha256 = 1, 41, hubtest.Sha([]byte("unknown here"))
	l := n.Connect(ahead)
	require.False(t, l.Welcome.GetNewIncarnation(), "a hub that is behind is no fault of the node's store")
	state, _ := l.ExpectState(0)
	require.Equal(t, uint64(42), state.GetGeneration())
	l.Report(42)

	conflict := hubtest.Hello("i1")
	conflict.Epoch, conflict.Generation, conflict.StateSha256 = 1, 42, hubtest.Sha([]byte("other content"))
	l = n.Connect(conflict)
	state, _ = l.ExpectState(0)
	require.Equal(t, uint64(43), state.GetGeneration())
	l.Report(43)

	l.Send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Nack{Nack: &protocol.Nack{
		Document: protocol.Envelope_STATE, Epoch: 1, Generation: 43, Reason: protocol.Nack_GENERATION_CONFLICT,
	}}})
	state, _ = l.ExpectState(0)
	require.Equal(t, uint64(44), state.GetGeneration())
}

func TestLaw02StoreThatFellBehindTakesANewIncarnation(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	l := n.Connect(hubtest.Hello("i1"))
	state, push := l.ExpectState(0)
	l.Report(state.GetGeneration())
	require.Empty(t, hubtest.Upload(t, l.OpenUsage(), n.Seal("i1", nil)[0]).GetNackReason())

	whole := hubtest.Hello("i1")
	whole.Epoch, whole.Generation, whole.StateSha256, whole.LastSegment = 1, state.GetGeneration(),
		hubtest.Sha(push.GetEnvelope().GetPayload()), 1
	l = n.Connect(whole)
	require.False(t, l.Welcome.GetNewIncarnation())
	require.Equal(t, uint64(1), l.Welcome.GetPostedSegment())

	lost := proto.CloneOf(whole)
	lost.LastSegment = 0
	require.True(t, n.Connect(lost).Welcome.GetNewIncarnation(), "a segment that the hub has is unknown to the store")
	require.False(t, n.Connect(hubtest.Hello("i2")).Welcome.GetNewIncarnation())
}

func revenue(h *hubtest.Hub) int64 {
	h.T.Helper()
	return hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (n int64, err error) {
		return n,
			tx.QueryRow(ctx, `SELECT (COALESCE((SELECT sum(amount_nanos) FROM entries WHERE account = 'platform:revenue'), 0)
			+ COALESCE((SELECT sum(collected_nanos - host_nanos + written_off_nanos) FROM pending_postings), 0))::INT8`).Scan(&n)
	})
}

// TestLaw05SegmentsAreBilledOnceInAnyOrder: duplicated, replayed after a reconnect, out of order and raced, every
// second is posted once; the acknowledgement names only what is posted without a gap.
func TestLaw05SegmentsAreBilledOnceInAnyOrder(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	_, member, lease := hubtest.Running(t, h, l)
	start := h.Now().Truncate(time.Microsecond)
	h.Advance(10 * time.Minute)
	segments := n.Seal("i1",
		[]*protocol.UsageRecord{hubtest.SessionSeconds(member, lease, start, 30)},
		[]*protocol.UsageRecord{hubtest.SessionSeconds(member, lease, start.Add(30*time.Second), 30)},
		[]*protocol.UsageRecord{hubtest.SessionSeconds(member, lease, start.Add(60*time.Second), 30)},
		[]*protocol.UsageRecord{hubtest.SessionSeconds(member, lease, start.Add(90*time.Second), 30)},
	)
	stream := l.OpenUsage()
	for _, step := range []struct {
		segment int
		posted  uint64
	}{{0, 1}, {0, 1}, {2, 1}, {2, 1}, {3, 1}, {1, 4}, {0, 4}, {3, 4}} {
		ack := hubtest.Upload(t, stream, segments[step.segment])
		require.Empty(t, ack.GetNackReason())
		require.Equal(t, step.posted, ack.GetPostedSegment(), "after segment %d", step.segment+1)
	}
	require.Equal(t, 4, hubtest.Count(h, `SELECT count(*) FROM usage_recent WHERE meter = 'session_seconds'`))
	require.Equal(t, 0, hubtest.Count(h, `SELECT count(*) FROM usage_ahead`), "the gap is closed and forgotten")
	// 3.60 EUR an hour are 1 000 000 nanos a second.
	require.Equal(t, int64(120*1_000_000), revenue(h))

	// After a reconnect both streams send everything again, at the same time.
	again := n.Connect(hubtest.Hello("i1"))
	again.ExpectState(1)
	done := make(chan *protocol.UsageAck, 2)
	for range 2 {
		s := again.OpenUsage()
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
	h := hubtest.New(t)
	n := h.Enroll()
	l := n.Connect(hubtest.Hello("i1"))
	l.ExpectState(0)
	stream := l.OpenUsage()
	good := n.Seal("i1", nil, nil, nil)
	fork := n.Seal("i1", []*protocol.UsageRecord{{MemberId: db.NewID(), Meter: protocol.MeterSessionSeconds}}, nil,
		nil)
	require.Empty(t, hubtest.Upload(t, stream, good[0]).GetNackReason())
	require.Equal(t, protocol.Nack_CHAIN_BROKEN, hubtest.Upload(t, stream, fork[0]).GetNackReason(),
		"another content under a posted number")
	require.Equal(t, protocol.Nack_CHAIN_BROKEN, hubtest.Upload(t, stream, fork[1]).GetNackReason(),
		"does not follow what was posted")
	require.Empty(t, hubtest.Upload(t, stream, good[2]).GetNackReason())
	require.Equal(t, protocol.Nack_CHAIN_BROKEN, hubtest.Upload(t, stream, fork[2]).GetNackReason(),
		"another content under a number beyond "+
			"the gap")
	ack := hubtest.Upload(t, stream, good[1])
	require.Empty(t, ack.GetNackReason())
	require.Equal(t, uint64(3), ack.GetPostedSegment())
	require.Positive(t,
		hubtest.Count(h,
			`SELECT count(*) FROM node_refusals WHERE node_id = $1 AND document = 'usage' AND reason = 'chain_broken'`,
			n.ID))

	other := h.Enroll()
	require.Equal(t, protocol.Nack_SIGNATURE_INVALID, hubtest.Upload(t, stream, other.Seal("i1", nil)[0]).GetNackReason(),
		"signed by another node")
	stolen := *other
	stolen.Key = n.Key
	require.Equal(t, protocol.Nack_WRONG_NODE, hubtest.Upload(t, stream, stolen.Seal("i1", nil)[0]).GetNackReason())
}

// TestLaw06MoneyBalancesThroughIntake: whatever comes in, the entries of every posting sum to zero.
func TestLaw06MoneyBalancesThroughIntake(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	_, member, lease := hubtest.Running(t, h, l)
	start := h.Now().Truncate(time.Microsecond)
	h.Advance(10 * time.Minute)
	segments := n.Seal("i1",
		[]*protocol.UsageRecord{hubtest.SessionSeconds(member, lease, start, 7), hubtest.SessionSeconds(member, lease,
			start.Add(7*time.Second), 13)},
		// Nobody's, beyond the lease, in the future, the same time again under another name: into suspense.
		[]*protocol.UsageRecord{
			hubtest.SessionSeconds(db.NewID(), lease, start, 100), hubtest.SessionSeconds(member, lease, start.Add(24*time.Hour),
				50),
			hubtest.SessionSeconds(member, lease, start, 20),
		},
	)
	stream := l.OpenUsage()
	for _, env := range append(segments, segments...) {
		require.Empty(t, hubtest.Upload(t, stream, env).GetNackReason())
	}
	require.Equal(t, 0,
		hubtest.Count(h,
			`SELECT count(*) FROM (SELECT posting_id FROM entries GROUP BY posting_id, currency
				HAVING sum(amount_nanos) <> 0) x`))
	require.Equal(t, int64(20*1_000_000), revenue(h), "only what was leased, elapsed and the member's own")
}

// TestLaw08NodeChangesHaveEventAndAuditRow: each change of a node through this way leaves exactly one event and one
// audit row.
func TestLaw08NodeChangesHaveEventAndAuditRow(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	l := n.Connect(hubtest.Hello("i1"))
	l.ExpectState(0)
	l.Send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Nack{Nack: &protocol.Nack{
		Document:   protocol.Envelope_STATE,
		Generation: 9, Reason: protocol.Nack_SIGNATURE_INVALID,
	}}})
	l.Report(1)
	h.Advance(time.Hour)
	require.NoError(t, h.Nodes.Sweep(t.Context()))
	events := hubtest.Count(h, `SELECT count(*) FROM events WHERE subject = $1`, n.ID)
	require.Equal(t, 4, events, "enrolled, online, document_refused, offline")
	require.Equal(t, events, hubtest.Count(h, `SELECT count(*) FROM audit_rows WHERE resource_id = $1`, n.ID))
	require.Equal(t, events, hubtest.Count(h, `SELECT count(DISTINCT resource_version) FROM events WHERE subject = $1`,
		n.ID),
		"each has its own number")
}
