package nodes_test

import (
	"context"
	"crypto/ed25519"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/periodic"
	"github.com/gpuaas/gpuaas/hub/internal/query"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// exported are a node's exported segments by their number.
func exported(h *hubtest.Hub, n *hubtest.Node, from, to time.Time) map[uint64]*protocol.Envelope {
	h.T.Helper()
	out := map[uint64]*protocol.Envelope{}
	export := query.ExportSegments{DB: h.DB, Emit: func(s ledger.SignedSegment) error {
		require.Equal(h.T, "i1", s.Incarnation)
		require.NotContains(h.T, out, s.Number, "each segment once")
		env := &protocol.Envelope{}
		out[s.Number] = env
		return proto.Unmarshal(s.Envelope, env)
	}}
	require.NoError(h.T, export.Do(h.T.Context(), n.ID, from, to))
	return out
}

func TestTheExportOfAnUnknownNodeFails(t *testing.T) {
	export := query.ExportSegments{DB: hubtest.New(t).DB, Emit: func(ledger.SignedSegment) error { return nil }}
	err := export.Do(t.Context(), db.NewID(), time.Time{}, time.Now())
	require.True(t, fault.Is(err, fault.NotFound), "%v", err)
}

// beginSlot sets the clock to a minute after the next change of slots: none comes but by Advance.
func beginSlot(h *hubtest.Hub) {
	now := h.Now()
	h.Advance(now.Truncate(4 * time.Hour).Add(4*time.Hour + time.Minute).Sub(now))
}

func rotate(h *hubtest.Hub) {
	h.T.Helper()
	require.NoError(h.T, periodic.Passes{DB: h.DB, Log: slog.New(slog.DiscardHandler)}.RotateUsage(h.T.Context(), h.Now()))
}

func deleteOld(h *hubtest.Hub) {
	h.T.Helper()
	require.NoError(h.T, (&periodic.DeleteOld{
		Passes:    periodic.Passes{DB: h.DB, Log: slog.New(slog.DiscardHandler)},
		Retention: periodic.DefaultRetention(),
	}).Do(h.T.Context(), h.Now()))
}

// The segments that a node signed can be had until the end of the dispute window, whether or not the raw usage is still
// there: they verify with the node's key and say what was posted.
func TestSignedSegmentsProveWhatWasPosted(t *testing.T) {
	h := hubtest.New(t)
	h.PublishDemo()
	n, other := h.Enroll(), h.Enroll()
	l, neighbour := n.Connect(hubtest.Hello("i1")), other.Connect(hubtest.Hello("i1"))
	state, _ := l.ExpectState(0)
	beginSlot(h)
	l.Report(state.GetGeneration()) // it is online by the new time
	_, member, lease := hubtest.Running(t, h, l)
	start := h.Now().Truncate(time.Microsecond)
	h.Advance(10 * time.Minute)
	begun := h.Now()
	var runs [][]*protocol.UsageRecord
	for k := range 5 {
		runs = append(runs, []*protocol.UsageRecord{hubtest.SessionSeconds(member, lease,
			start.Add(time.Duration(k)*30*time.Second), 30)})
	}
	chain := n.Seal("i1", runs...)
	stream := l.OpenUsage()
	for _, k := range []int{0, 1, 0, 3, 2, 2, 4} { // out of order, and some twice
		require.Empty(t, hubtest.Upload(t, stream, chain[k]).GetNackReason())
	}
	require.Empty(t, hubtest.Upload(t, neighbour.OpenUsage(), other.Seal("i1", nil)[0]).GetNackReason())
	check := func(when string) {
		t.Helper()
		got := exported(h, n, time.Time{}, h.Now())
		require.Len(t, got, len(chain), when)
		for k, env := range chain {
			require.True(t, proto.Equal(env, got[uint64(k+1)]), when)
			v, err := protocol.VerifySegment(got[uint64(k+1)], n.Key.Public().(ed25519.PublicKey))
			require.NoError(t, err, when)
			require.True(t, proto.Equal(runs[k][0], v.Message().GetRecords()[0]), when)
		}
		require.Len(t, exported(h, other, time.Time{}, h.Now()), 1)
		require.Empty(t, exported(h, n, time.Time{}, begun.Add(-5*time.Hour)))
	}
	check("before they are packed")
	posted := hubtest.Count(h, `SELECT sum(quantity)::INT8 FROM usage_recent WHERE subject_id = $1`, member)
	require.Equal(t, 150_000_000, posted)

	// A pass that was killed after a part of its work.
	h.Advance(4 * time.Hour)
	rotate(h)
	slots := hubtest.Tx(h, func(ctx context.Context, tx db.Tx) ([]ledger.Slot, error) { return ledger.Slots(ctx, tx) })
	require.False(t, hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (bool, error) {
		return ledger.ArchiveNext(ctx, tx, slots[0])
	}))
	check("half packed")
	for range 6 {
		require.Equal(t, 5, hubtest.Count(h, `SELECT count(*) FROM usage_recent WHERE subject_id = $1`, member),
			"raw usage stays a day")
		h.Advance(4 * time.Hour)
		rotate(h)
	}
	require.Zero(t, hubtest.Count(h, `SELECT count(*) FROM usage_recent WHERE subject_id = $1`, member))
	for k := range 8 {
		require.Zero(t, hubtest.Count(h, fmt.Sprintf(`SELECT count(*) FROM usage_segments_%d`, k)))
	}
	require.Equal(t, 2, hubtest.Count(h, `SELECT count(*) FROM usage_archive`))
	require.Equal(t, 5, hubtest.Count(h, `SELECT records FROM usage_archive WHERE node_id = $1`, n.ID))
	check("packed")
	require.Empty(t, exported(h, n, begun.Add(5*time.Hour), h.Now()))

	h.Advance(33 * 24 * time.Hour)
	deleteOld(h)
	check("at the end of the dispute window")
	h.Advance(3 * 24 * time.Hour)
	deleteOld(h)
	require.Zero(t, hubtest.Count(h, `SELECT count(*) FROM usage_archive`))
}

// What came after a slot was packed is packed, too, before the slot is emptied.
func TestSlotIsNotEmptiedBeforeAllOfItIsArchived(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	stream := n.Connect(hubtest.Hello("i1")).OpenUsage()
	beginSlot(h)
	chain := n.Seal("i1", nil, nil, nil)
	for _, k := range []int{0, 2} {
		require.Empty(t, hubtest.Upload(t, stream, chain[k]).GetNackReason())
	}
	from := h.Now()
	for range 8 {
		h.Advance(4 * time.Hour)
		if h.Now().Sub(from) < 28*time.Hour {
			rotate(h)
		}
	}
	slots := hubtest.Tx(h, func(ctx context.Context, tx db.Tx) ([]ledger.Slot, error) { return ledger.Slots(ctx, tx) })
	require.False(t, hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (bool, error) {
		return ledger.ArchiveNext(ctx, tx, slots[0])
	}))
	hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (int, error) {
		_, err := tx.Exec(ctx,
			fmt.Sprintf(
				`INSERT INTO usage_segments_%d SELECT node_id, incarnation, 2, envelope FROM usage_segments_%d WHERE number = 1`,
				slots[0].No, slots[0].No))
		return 0, err
	})
	pass := periodic.Passes{DB: h.DB, Log: slog.New(slog.DiscardHandler)}
	require.Error(t, pass.RotateUsage(t.Context(), h.Now()))
	left := hubtest.Tx(h, func(ctx context.Context, tx db.Tx) ([]ledger.Slot, error) { return ledger.Slots(ctx, tx) })
	require.Equal(t, slots[0].No, left[0].No)
	require.Equal(t, slots[2].No, left[1].No, "the one between does not wait for it")
	require.Equal(t, 3, hubtest.Count(h, fmt.Sprintf(`SELECT count(*) FROM usage_segments_%d`, slots[0].No)))
	require.NoError(t, pass.RotateUsage(t.Context(), h.Now()))
	require.Equal(t, 3, hubtest.Count(h, `SELECT sum(segments)::INT8 FROM usage_archive`))
}

// What is packed, and dropped from its slot, while an export runs is in it.
func TestAnExportHasWhatIsPackedMeanwhile(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	stream := n.Connect(hubtest.Hello("i1")).OpenUsage()
	beginSlot(h)
	for _, env := range n.Seal("i1", nil, nil) {
		require.Empty(t, hubtest.Upload(t, stream, env).GetNackReason())
		h.Advance(4 * time.Hour)
		rotate(h)
	}
	var numbers []uint64
	export := query.ExportSegments{DB: h.DB, Emit: func(s ledger.SignedSegment) error {
		if numbers = append(numbers, s.Number); len(numbers) > 1 {
			return nil
		}
		for range 6 {
			h.Advance(4 * time.Hour)
			rotate(h)
		}
		return nil
	}}
	require.NoError(t, export.Do(t.Context(), n.ID, time.Time{}, h.Now()))
	require.Equal(t, []uint64{1, 2}, numbers)
	for k := range 8 {
		require.Zero(t, hubtest.Count(h, fmt.Sprintf(`SELECT count(*) FROM usage_segments_%d`, k)))
	}
}
