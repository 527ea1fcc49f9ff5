package nodes_test

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/protocol"
)

// anything fills a message with values that no honest node sends, among those that it does.
func anything(r *rand.Rand, m protoreflect.Message) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if r.IntN(4) == 0 {
			continue
		}
		if f.IsList() {
			list := m.Mutable(f).List()
			for range r.IntN(4) {
				if f.Message() != nil {
					anything(r, list.AppendMutable().Message())
				} else {
					list.Append(anyValue(r, f.Kind()))
				}
			}
			continue
		}
		if f.Message() != nil {
			anything(r, m.Mutable(f).Message())
			continue
		}
		m.Set(f, anyValue(r, f.Kind()))
	}
}

func anyOf[T any](r *rand.Rand, values ...T) T { return values[r.IntN(len(values))] }

func anyValue(r *rand.Rand, kind protoreflect.Kind) protoreflect.Value {
	switch kind {
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(anyOf(r, "", "ready", "failed", "session_seconds", "\x00", "a\x00b", "é\u202e",
			strings.Repeat("long ", 300), db.NewID()))
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes(anyOf(r, nil, []byte{0}, make([]byte, 300)))
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(r.IntN(2) == 0)
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(anyOf[protoreflect.EnumNumber](r, 0, 1, 3, 8, 16, 4711, -1, math.MaxInt32))
	case protoreflect.Int32Kind:
		return protoreflect.ValueOfInt32(anyOf[int32](r, 0, 1, -1, math.MinInt32, math.MaxInt32))
	case protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32(anyOf[uint32](r, 0, 1, math.MaxUint32))
	case protoreflect.Uint64Kind:
		return protoreflect.ValueOfUint64(anyOf[uint64](r, 0, 1, 7, math.MaxInt64, math.MaxUint64))
	case protoreflect.Int64Kind:
		return protoreflect.ValueOfInt64(anyOf(r, 0, 1, -1, time.Now().Unix(), time.Now().Unix()-60, math.MinInt64,
			math.MaxInt64, 9_000_000_000_000))
	default:
		panic("no values for " + kind.String())
	}
}

// Whatever a node says about its members is taken or left, and never keeps what else it says from being taken.
func TestReportOfAnythingIsTakenIn(t *testing.T) {
	h, _, l := hubtest.NewWithNode(t)
	i, member, _ := hubtest.Running(t, h, l)
	for seed := range uint64(100) {
		t.Log("seed", seed)
		s := &protocol.WorkloadStatus{}
		anything(rand.New(rand.NewPCG(seed, 1)), s.ProtoReflect())
		s.MemberId, s.InstanceId = member, i.ID
		l.Report(2, s)
	}
}

// Whatever a node measures is posted or in suspense: no segment of its own keeps the ones behind it from the books.
func TestUsageOfAnythingIsPosted(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	_, member, lease := hubtest.Running(t, h, l)
	var runs [][]*protocol.UsageRecord
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 2))
		var records []*protocol.UsageRecord
		for range 1 + r.IntN(12) {
			u := &protocol.UsageRecord{}
			anything(r, u.ProtoReflect())
			if r.IntN(2) == 0 {
				u.MemberId, u.LeaseNo = member, lease.GetLeaseNo()
			}
			records = append(records, u)
		}
		runs = append(runs, records)
	}
	stream := l.OpenUsage()
	for k, env := range n.Seal("i1", runs...) {
		ack := hubtest.Upload(t, stream, env)
		require.Empty(t, ack.GetNackReason(), "segment of seed %d", k)
		require.EqualValues(t, k+1, ack.GetPostedSegment())
	}
	require.Empty(t, h.Findings())
}

// A segment that the database does not take is kept as it was signed, is a finding, and holds up nothing behind it.
func TestSegmentThatCannotBePostedIsSetAside(t *testing.T) {
	h := hubtest.New(t)
	h.PublishDemo()
	n, other := h.Enroll(), h.Enroll()
	l := n.Connect(hubtest.Hello("i1"))
	l.ExpectState(0)
	neighbour := other.Connect(hubtest.Hello("i1"))
	_, member, lease := hubtest.Running(t, h, l)
	hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (int, error) {
		slot, err := ledger.CurrentSlot(ctx, tx, h.Now())
		if err != nil {
			return 0, err
		}
		for _, n := range []int64{slot.No, slot.No + 1} {
			if _, err := tx.Exec(ctx,
				fmt.Sprintf(`ALTER TABLE usage_records_%d ADD CONSTRAINT no_such_amount CHECK (quantity <> 31000000)`,
					n)); err != nil {
				return 0, err
			}
		}
		return 0, nil
	})
	start := h.Now().Truncate(time.Microsecond)
	h.Advance(10 * time.Minute)
	chain := n.Seal("i1",
		[]*protocol.UsageRecord{hubtest.SessionSeconds(member, lease, start, 30)},
		[]*protocol.UsageRecord{hubtest.SessionSeconds(member, lease, start.Add(30*time.Second), 31)},
		[]*protocol.UsageRecord{hubtest.SessionSeconds(member, lease, start.Add(61*time.Second), 30)},
	)
	stream := l.OpenUsage()
	for k, env := range chain {
		ack := hubtest.Upload(t, stream, env)
		require.Empty(t, ack.GetNackReason())
		require.EqualValues(t, k+1, ack.GetPostedSegment())
	}
	require.Empty(t, hubtest.Upload(t, neighbour.OpenUsage(), other.Seal("i1", nil)[0]).GetNackReason())
	require.Equal(t, int64(60*1_000_000), revenue(h))
	require.Equal(t, map[string]string{finding.Usage: "i1/2"}, h.Findings())
	kept := hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (raw []byte, err error) {
		return raw, tx.QueryRow(ctx, `SELECT envelope FROM usage_set_aside WHERE node_id = $1 AND number = 2`,
			n.ID).Scan(&raw)
	})
	env := &protocol.Envelope{}
	require.NoError(t, proto.Unmarshal(kept, env))
	require.True(t, proto.Equal(chain[1], env))
	require.Empty(t, hubtest.Upload(t, stream, chain[1]).GetNackReason(), "it is known when it comes again")
	require.Len(t, h.Findings(), 1)
}

// A proof that is dated when it cannot be ends the claim when it comes: usage of before is billed, and nothing else of
// the report is lost.
func TestProofWithAnImpossibleTimeEndsTheClaimWhenItComes(t *testing.T) {
	for name, at := range map[string]*timestamppb.Timestamp{
		"1970": {Seconds: 1}, "the year 300000": {Seconds: 9_000_000_000_000}, "no time at all": {
			Seconds: math.MinInt64,
		}, "next year": timestamppb.New(time.Now().AddDate(1, 0, 0)),
	} {
		t.Run(name, func(t *testing.T) {
			h, n, l := hubtest.NewWithNode(t)
			i, member, lease := hubtest.Running(t, h, l)
			start := h.Now().Truncate(time.Microsecond)
			h.Advance(10 * time.Minute)
			h.Decommission(i.ID)
			state, _ := l.ExpectState(0)
			l.Report(state.GetGeneration(), &protocol.WorkloadStatus{
				MemberId: member, InstanceId: i.ID, Status: protocol.WorkloadStatus_REMOVED, Removal: &protocol.RemovalProof{
					At:     at,
					Absent: protocol.RemovalKinds(), Incarnation: "i1",
				},
			})
			require.Empty(t,
				hubtest.Upload(t, l.OpenUsage(), n.Seal("i1", []*protocol.UsageRecord{hubtest.SessionSeconds(member, lease, start,
					60)})[0]).
					GetNackReason())
			require.Equal(t, int64(60*1_000_000), revenue(h))
		})
	}
}

// A node that refuses by turns fills neither table nor event stream, and does not make the hub sign states.
func TestTenThousandRefusalsLeaveFewRows(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	l := n.Connect(hubtest.Hello("i1"))
	state, _ := l.ExpectState(0)
	events := hubtest.Count(h, `SELECT count(*) FROM events`)
	for k := range 10_000 {
		reason := []protocol.Nack_Reason{
			protocol.Nack_GENERATION_OLDER, protocol.Nack_GENERATION_CONFLICT,
			protocol.Nack_TOO_LARGE,
		}[k%3]
		require.NoError(t, h.Nodes.Nack(t.Context(), nodelink.Peer{NodeID: n.ID}, &protocol.Nack{
			Document:   protocol.Envelope_STATE,
			Generation: state.GetGeneration() + 1000 + uint64(k), Reason: reason,
		}))
	}
	for k := range 200 {
		require.NoError(t, h.Nodes.Nack(t.Context(), nodelink.Peer{NodeID: n.ID}, &protocol.Nack{
			Document: protocol.Envelope_Kind(100 + k),
			Reason:   4711,
		}))
	}
	require.Equal(t, 3, hubtest.Count(h, `SELECT count(*) FROM node_refusals`))
	require.Equal(t, 3, hubtest.Count(h, `SELECT count(*) FROM events`)-events)
	require.Equal(t, 3,
		hubtest.Count(h, `SELECT count(*) FROM audit_rows WHERE resource_id = $1 AND action = 'fleet.node.document'`, n.ID))
	require.NoError(t, h.Dispatcher.SyncAll(t.Context()))
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM node_states`), "what was never sent cannot have been "+
		"refused")
}
