package nodes_test

import (
	"context"
	"fmt"
	"io"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protodelim"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/hub/usagechain"
	"github.com/gpuaas/gpuaas/protocol"
)

// books is everything that usage may change.
func books(h *hubtest.Hub) map[string]int {
	out := map[string]int{"revenue": int(revenue(h))}
	for _, table := range []string{
		"usage_recent", "suspense_records", "usage_hours", "pending_postings", "postings", "entries", "usage_coverage",
		"usage_watermarks", "usage_ahead", "leases", "instance_members",
	} {
		out[table] = hubtest.Count(h, `SELECT count(*) FROM `+table)
	}
	return out
}

// flip returns a copy of an envelope in which change has been at work; what was sent before stays as it is.
func flip(env *protocol.Envelope, change func(*protocol.Envelope)) *protocol.Envelope {
	out := proto.CloneOf(env)
	change(out)
	return out
}

// abusedSegment is a segment that the hub refuses for the reason.
type abusedSegment struct {
	name   string
	reason protocol.Nack_Reason
	env    *protocol.Envelope
}

// abusedSegments changes the true next segment of a node in every way.
func abusedSegments(t *testing.T, n, stranger *hubtest.Node, next *protocol.Envelope) []abusedSegment {
	t.Helper()
	seal := func(change func(*protocol.UsageSegment)) *protocol.Envelope {
		seg := &protocol.UsageSegment{}
		require.NoError(t, proto.Unmarshal(next.GetPayload(), seg))
		change(seg)
		env, err := protocol.SignMessage(protocol.PayloadSegment, seg, protocol.NewEd25519Signer(n.Key))
		require.NoError(t, err)
		return env
	}
	cut, err := protocol.Sign(protocol.PayloadSegment, next.GetPayload()[:len(next.GetPayload())/2],
		protocol.NewEd25519Signer(n.Key))
	require.NoError(t, err)
	return []abusedSegment{
		{"a byte of the payload flipped", protocol.Nack_SIGNATURE_INVALID, flip(next, func(e *protocol.Envelope) {
			e.Payload[len(e.GetPayload())/2] ^= 1
		})},
		{"a byte of the signature flipped", protocol.Nack_SIGNATURE_INVALID, flip(next, func(e *protocol.Envelope) {
			e.Signatures[0].Signature[7] ^= 1
		})},
		{"signed by another node", protocol.Nack_SIGNATURE_INVALID, stranger.Seal("i1", nil)[0]},
		{"another kind of document", protocol.Nack_MALFORMED, flip(next, func(e *protocol.Envelope) {
			e.PayloadType = protocol.PayloadState
		})},
		{"without a signature", protocol.Nack_SIGNATURE_INVALID, flip(next, func(e *protocol.Envelope) {
			e.Signatures = nil
		})},
		{"no envelope", protocol.Nack_MALFORMED, nil},
		{"truncated on its way", protocol.Nack_SIGNATURE_INVALID, flip(next, func(e *protocol.Envelope) {
			e.Payload = e.GetPayload()[:len(e.GetPayload())-9]
		})},
		{"truncated before it was signed", protocol.Nack_MALFORMED, cut},
		{"of another node", protocol.Nack_WRONG_NODE, seal(func(s *protocol.UsageSegment) { s.NodeId = stranger.ID })},
		{"other content under a posted number", protocol.Nack_CHAIN_BROKEN, seal(func(s *protocol.UsageSegment) {
			s.Number = 3
		})},
		{"after another predecessor", protocol.Nack_CHAIN_BROKEN, seal(func(s *protocol.UsageSegment) {
			s.PreviousSha256[0] ^= 1
		})},
		{"far beyond what is missing", protocol.Nack_OUT_OF_ORDER, seal(func(s *protocol.UsageSegment) {
			s.Number += usagechain.MaxAhead + 1
		})},
		{"records with a gap", protocol.Nack_MALFORMED, seal(func(s *protocol.UsageSegment) {
			s.Records = append(s.Records, proto.CloneOf(s.GetRecords()[0]))
			s.Records[1].Sequence += 7
		})},
	}
}

// TestLaw05AbusedSegmentsChangeNothing: whatever is done to segments on their way, in whatever order and however late
// they come, each true one is posted once, and every other is refused with a reason that an admin can read; nothing
// else changes, and the session goes on.
func TestLaw05AbusedSegmentsChangeNothing(t *testing.T) {
	h := hubtest.New(t)
	h.PublishDemo()
	n, stranger := h.Enroll(), h.Enroll()
	l := n.Connect(hubtest.Hello("i1"))
	l.ExpectState(0)
	_, member, lease := hubtest.Running(t, h, l)
	start := h.Now().Truncate(time.Microsecond)
	h.Advance(10 * time.Minute)
	run := func(second int64) []*protocol.UsageRecord {
		return []*protocol.UsageRecord{hubtest.SessionSeconds(member, lease, start.Add(time.Duration(second)*time.Second),
			30)}
	}
	chain := n.Seal("i1", run(0), run(30), run(60), run(90))
	stream := l.OpenUsage()
	// Reordered and duplicated: the third before the second, each twice.
	for _, step := range []struct {
		segment int
		posted  uint64
	}{{0, 1}, {0, 1}, {2, 1}, {2, 1}, {1, 3}, {1, 3}} {
		ack := hubtest.Upload(t, stream, chain[step.segment])
		require.Empty(t, ack.GetNackReason())
		require.Equal(t, step.posted, ack.GetPostedSegment())
	}
	require.Equal(t, int64(90*1_000_000), revenue(h))

	for _, c := range abusedSegments(t, n, stranger, chain[3]) {
		before := books(h)
		ack := hubtest.Upload(t, stream, c.env)
		require.Equal(t, c.reason, ack.GetNackReason(), c.name)
		require.Zero(t, ack.GetPostedSegment(), c.name)
		require.Equal(t, before, books(h), c.name)
		last := hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (map[string][]fleet.Refusal, error) {
			return fleet.Refusals(ctx, tx, n.ID)
		})[n.ID]
		require.Equal(t, "usage", last[0].Document, c.name)
		require.Equal(t, c.reason.Text(), last[0].Reason, c.name)
		require.NotEmpty(t, last[0].Detail, c.name)
	}
	require.Zero(t, hubtest.Count(h, `SELECT count(*) FROM audit_rows WHERE resource_id = $1
		AND action = 'fleet.node.document' AND source_address NOT LIKE '127.%'`, n.ID), "the node's address is in each row")
	require.NotZero(t, hubtest.Count(h, `SELECT count(*) FROM audit_rows WHERE resource_id = $1
		AND action = 'fleet.node.document'`, n.ID))

	// Cut off in the middle of a message: that stream ends, and another takes its place.
	before := books(h)
	torn := l.OpenUsage()
	_, err := protodelim.MarshalTo(half{torn}, &protocol.UsageUpload{Segment: chain[3]})
	require.NoError(t, err)
	require.NoError(t, torn.CloseWrite())
	require.Error(t, torn.Receive(&protocol.UsageAck{}, protocol.MaxControlBytes))
	require.Equal(t, before, books(h))

	// All segments again a day later, from last to first, and once more under the next incarnation.
	h.Advance(24 * time.Hour)
	for _, env := range slices.Backward(chain[:3]) {
		require.Empty(t, hubtest.Upload(t, stream, env).GetNackReason())
	}
	require.Equal(t, before, books(h), "what was posted yesterday is known today")
	ack := hubtest.Upload(t, stream, chain[3])
	require.Empty(t, ack.GetNackReason(), "the true one follows as if nothing had been")
	require.Equal(t, uint64(4), ack.GetPostedSegment())
	require.Equal(t, int64(120*1_000_000), revenue(h))
	require.Equal(t, hubtest.Sha(chain[3].GetPayload()), ack.GetPostedSha256())
	l.Report(2)
	again := n.Seal("i2", run(0), run(30))
	require.Equal(t, protocol.Nack_MALFORMED, hubtest.Upload(t, stream, again[0]).GetNackReason(),
		"a session carries the segments of one store")
	renamed := n.Connect(hubtest.Hello("i2"))
	for _, env := range again {
		require.Empty(t, hubtest.Upload(t, renamed.OpenUsage(), env).GetNackReason())
	}
	require.Equal(t, int64(120*1_000_000), revenue(h), "the same time under another name is in suspense, not on the bill")
}

// half is a connection that breaks in the middle of what is written.
type half struct{ to io.Writer }

// Write implements io.Writer.
func (w half) Write(p []byte) (int, error) {
	if _, err := w.to.Write(p[:(len(p)+1)/2]); err != nil {
		return 0, err
	}
	return len(p), nil
}

// A node that catches up need not wait for each acknowledgement: they come all the same, in the order of the segments,
// and more segments than the hub takes at once wait on their way.
func TestSegmentsThatFollowEachOtherUnansweredAreAcknowledgedInTheirOrder(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	_, member, lease := hubtest.Running(t, h, l)
	start := h.Now().Truncate(time.Microsecond)
	const segments = 50
	h.Advance(segments * time.Second)
	var runs [][]*protocol.UsageRecord
	for i := range segments {
		runs = append(runs, []*protocol.UsageRecord{hubtest.SessionSeconds(member, lease,
			start.Add(time.Duration(i)*time.Second), 1)})
	}
	chain := n.Seal("i1", runs...)
	stream := l.OpenUsage()
	for _, env := range chain {
		require.NoError(t, stream.Send(&protocol.UsageUpload{Segment: env}))
	}
	posted := uint64(0)
	for i := range chain {
		ack := &protocol.UsageAck{}
		require.NoError(t, stream.Receive(ack, protocol.MaxControlBytes))
		require.Empty(t, ack.GetNackReason())
		require.GreaterOrEqual(t, ack.GetPostedSegment(), uint64(i+1), "what is acknowledged is posted")
		require.GreaterOrEqual(t, ack.GetPostedSegment(), posted)
		posted = ack.GetPostedSegment()
	}
	require.EqualValues(t, segments, posted)
	require.Equal(t, int64(segments*1_000_000), revenue(h))
	require.Equal(t, segments, hubtest.Count(h, `SELECT count(*) FROM usage_recent WHERE meter = 'session_seconds'`))
}

// TestSegmentsThatSkipRecordNumbersAreSetAside: a node that chooses the numbers of its records is billed nothing for
// those segments, makes the hub keep no row for each, and goes on as soon as it numbers as it should.
func TestSegmentsThatSkipRecordNumbersAreSetAside(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	_, member, lease := hubtest.Running(t, h, l)
	start := h.Now().Truncate(time.Microsecond)
	h.Advance(10 * time.Minute)
	const segments = 40
	var runs [][]*protocol.UsageRecord
	var wrong []string
	for k := range segments {
		r := hubtest.SessionSeconds(member, lease, start.Add(time.Duration(k)*time.Second), 1)
		r.Sequence = uint64(2*k + 1) // 1, 3, 5, …
		runs = append(runs, []*protocol.UsageRecord{r})
		wrong = append(wrong, fmt.Sprintf("i1/%d", k+1))
	}
	// The last two continue the numbers of those before them.
	runs[segments-2][0].Sequence, runs[segments-1][0].Sequence = 2*segments-4, 2*segments-3
	wrong = wrong[1 : segments-2]
	chain := n.SealNumbered("i1", runs...)
	stream := l.OpenUsage()

	// One by one.
	for k, env := range chain[:5] {
		ack := hubtest.Upload(t, stream, env)
		require.Empty(t, ack.GetNackReason())
		require.EqualValues(t, k+1, ack.GetPostedSegment())
		require.Equal(t, hubtest.Sha(env.GetPayload()), ack.GetPostedSha256())
	}
	// The next beyond a gap, before what is missing.
	require.EqualValues(t, 5, hubtest.Upload(t, stream, chain[7]).GetPostedSegment())
	for _, k := range []int{6, 5} {
		require.Empty(t, hubtest.Upload(t, stream, chain[k]).GetNackReason())
	}
	// The others at once, in batches as the hub makes them.
	for _, env := range chain[8:] {
		require.NoError(t, stream.Send(&protocol.UsageUpload{Segment: env}))
	}
	var posted uint64
	for range chain[8:] {
		ack := &protocol.UsageAck{}
		require.NoError(t, stream.Receive(ack, protocol.MaxControlBytes))
		require.Empty(t, ack.GetNackReason())
		posted = max(posted, ack.GetPostedSegment())
	}
	require.EqualValues(t, segments, posted)

	// The first, the one that came before what is missing, and the last two.
	require.Equal(t, int64(4*1_000_000), revenue(h))
	require.Equal(t, int(runs[segments-1][0].GetSequence()), hubtest.Count(h, `SELECT last_record FROM usage_watermarks`),
		"all are passed")
	require.Zero(t, hubtest.Count(h, `SELECT count(*) FROM usage_ahead`))
	require.Equal(t, 16, hubtest.Count(h, `SELECT count(*) FROM usage_set_aside`), "a node has room for so many")
	found := hubtest.Tx(h, func(ctx context.Context, tx db.Tx) ([]finding.Finding, error) { return finding.List(ctx, tx) })
	require.Len(t, found, 17, "one for each that is kept, and one for the store")
	for _, f := range found {
		require.Equal(t, finding.Usage, f.Kind)
		require.Contains(t, append(wrong, "i1"), f.ResourceID)
		require.Contains(t, f.Detail, "record")
	}
	require.Contains(t, found[0].Detail, "segment 2 begins with record 3 where record 2 is due")

	before := books(h)
	for _, env := range chain {
		require.Empty(t, hubtest.Upload(t, stream, env).GetNackReason(), "all are known when they come again")
	}
	require.Equal(t, before, books(h))

	// A new name for its store gives a node no room for more.
	require.NoError(t, l.Conn.Close(0, "again"))
	l = n.Connect(hubtest.Hello("i2"))
	r := hubtest.SessionSeconds(member, lease, start.Add(segments*time.Second), 1)
	r.Sequence = 2
	ack := hubtest.Upload(t, l.OpenUsage(), n.SealNumbered("i2", []*protocol.UsageRecord{r})[0])
	require.Empty(t, ack.GetNackReason())
	require.Equal(t, 16, hubtest.Count(h, `SELECT count(*) FROM usage_set_aside`))
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM recovery_findings WHERE resource_id = 'i2'`))
}

// Law 5: the room for segments that are set aside is each node's own. One that uses its up has the hub keep those of
// another all the same, as they were signed: they are acknowledged, and their node deletes them.
func TestLaw05OneNodesSegmentsTakeNoRoomOfAnothers(t *testing.T) {
	h := hubtest.New(t)
	greedy, other := h.Enroll(), h.Enroll()
	wrong := func(k int) []*protocol.UsageRecord {
		r := hubtest.SessionSeconds(db.NewID(), nil, h.Now(), 1)
		r.Sequence = uint64(2 * k) // 2, 4, 6, …
		return []*protocol.UsageRecord{r}
	}
	var runs [][]*protocol.UsageRecord
	for k := range 20 {
		runs = append(runs, wrong(k+1))
	}
	stream := greedy.Connect(hubtest.Hello("i1")).OpenUsage()
	for _, env := range greedy.SealNumbered("i1", runs...) {
		require.Empty(t, hubtest.Upload(t, stream, env).GetNackReason())
	}
	sent := other.SealNumbered("i1", wrong(1))[0]
	ack := hubtest.Upload(t, other.Connect(hubtest.Hello("i1")).OpenUsage(), sent)
	require.EqualValues(t, 1, ack.GetPostedSegment())
	kept := hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (raw []byte, err error) {
		return raw, tx.QueryRow(ctx, `SELECT envelope FROM usage_set_aside WHERE node_id = $1`, other.ID).Scan(&raw)
	})
	env := &protocol.Envelope{}
	require.NoError(t, proto.Unmarshal(kept, env))
	require.True(t, proto.Equal(sent, env))
	require.Equal(t, 16, hubtest.Count(h, `SELECT count(*) FROM usage_set_aside WHERE node_id = $1`, greedy.ID))
}
