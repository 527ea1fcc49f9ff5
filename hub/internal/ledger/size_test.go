package ledger_test

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/protocol"
)

// sealer makes the segments of a node as an agent does: all members are cut at one beat every 30 s, by a clock that is never exact.
type sealer struct {
	nodeID   string
	key      ed25519.PrivateKey
	random   *rand.Rand
	members  []ledger.Subject
	runs     []string
	cutAt    time.Time
	number   uint64
	sequence uint64
	previous []byte
}

func newSealer(w *world, members int, from time.Time) *sealer {
	w.t.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	require.NoError(w.t, err)
	s := &sealer{nodeID: db.NewID(), key: key, random: rand.New(rand.NewPCG(uint64(w.keys), 1)), cutAt: from}
	w.node = s.nodeID
	for range members {
		m := w.subject(ledger.Member)
		m.CPUMillis, m.MemoryBytes = 4000, 8<<30
		m, err := w.open(m)
		require.NoError(w.t, err)
		w.lease(m, ledger.MaxLease)
		run := sha256.Sum256([]byte(m.ID))
		s.members, s.runs = append(s.members, m), append(s.runs, hex.EncodeToString(run[:16]))
	}
	return s
}

// next seals what was measured in the next 30 s.
func (s *sealer) next(t testing.TB) ledger.Segment {
	from := s.cutAt
	s.cutAt = from.Add(30*time.Second + time.Duration(s.random.IntN(20_000))*time.Microsecond)
	length := s.cutAt.Sub(from).Microseconds()
	s.number++
	seg := &protocol.UsageSegment{
		NodeId: s.nodeID, Incarnation: "0193f0a4-7f0b-7c3e-9a40-6f1f0b6f2f11", Number: s.number, PreviousSha256: s.previous, SealedAt: timestamppb.New(s.cutAt.Add(3 * time.Millisecond)),
	}
	for i, m := range s.members {
		for _, u := range []struct {
			meter    string
			quantity int64
		}{
			{protocol.MeterSessionSeconds, length},
			{protocol.MeterCPUSeconds, int64(s.random.IntN(4 * int(length)))},
			{protocol.MeterMemoryByteSeconds, int64(s.random.IntN(8<<30)) * 30},
		} {
			s.sequence++
			seg.Records = append(seg.Records, &protocol.UsageRecord{
				Sequence: s.sequence, MemberId: m.ID, Revision: 1, Meter: u.meter, Quantity: u.quantity, RunId: s.runs[i], LeaseNo: 1,
				StartedAt: timestamppb.New(from), EndedAt: timestamppb.New(s.cutAt),
			})
		}
	}
	env, err := protocol.SignMessage(protocol.PayloadSegment, seg, protocol.NewEd25519Signer(s.key))
	require.NoError(t, err)
	sum := sha256.Sum256(env.GetPayload())
	s.previous = sum[:]
	raw, err := proto.Marshal(env)
	require.NoError(t, err)
	read, err := ledger.ReadSegment(s.nodeID, seg.GetIncarnation(), seg)
	require.NoError(t, err)
	return read.Signed(raw)
}

// TestUsageTakesFewBytes posts a slot of four nodes with ten members and three meters each, and measures what a record takes: as a row with
// its indexes, in its signed segment, and in the archive.
func TestUsageTakesFewBytes(t *testing.T) {
	const nodes, members, cuts = 4, 10, 432
	w := newWorld(t)
	w.credit("10000000")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds, HostBasisPoints: 7000}, "3.6")
	var all []*sealer
	for range nodes {
		all = append(all, newSealer(w, members, noon))
	}
	w.now = noon.Add(3*time.Hour + 50*time.Minute)
	for at := 0; at < cuts; at += 48 {
		var batch []ledger.Segment
		for _, s := range all {
			for range 48 {
				batch = append(batch, s.next(t))
			}
		}
		must(w, func(ctx context.Context, tx db.Tx) (int, error) { return ledger.PostUsage(ctx, tx, w.now, batch...) })
	}
	const records = nodes * members * 3 * cuts
	require.EqualValues(t, records, number(w, `SELECT count(*) FROM usage_recent`))
	w.now = w.now.Add(4 * time.Hour)
	slot := must(w, func(ctx context.Context, tx db.Tx) (ledger.Slot, error) {
		if _, err := ledger.CurrentSlot(ctx, tx, w.now); err != nil {
			return ledger.Slot{}, err
		}
		slots, err := ledger.EndedSlots(ctx, tx, w.now)
		require.Len(t, slots, 1)
		return slots[0], err
	})
	for !must(w, func(ctx context.Context, tx db.Tx) (bool, error) { return ledger.ArchiveNext(ctx, tx, slot) }) {
	}
	require.EqualValues(t, records, number(w, `SELECT sum(records)::INT8 FROM usage_archive`))
	size := func(table string) float64 {
		return float64(number(w, fmt.Sprintf(`SELECT pg_total_relation_size('%s')`, table))) / records
	}
	raw, signed, archived := size(fmt.Sprintf("usage_records_%d", slot.No)), size(fmt.Sprintf("usage_segments_%d", slot.No)), size("usage_archive")
	packed := float64(number(w, `SELECT sum(octet_length(packed))::INT8 FROM usage_archive`)) / records
	t.Logf("bytes a record: %.1f as a row with its indexes, %.1f in its signed segment, %.1f packed, %.1f in the archive with all of its row",
		raw, signed, packed, archived)
	require.Less(t, raw, 330.0)
	require.Less(t, archived, 24.0)
}

// Segments are unpacked as they were packed, and an altered row is noticed.
func TestArchivedSegmentsAreCheckedWhenTheyAreUnpacked(t *testing.T) {
	w := newWorld(t)
	w.credit("1000")
	s := newSealer(w, 1, noon)
	w.now = noon.Add(time.Hour)
	batch := []ledger.Segment{s.next(t), s.next(t)}
	must(w, func(ctx context.Context, tx db.Tx) (int, error) {
		return ledger.PostUsage(ctx, tx, w.now, batch...)
	})
	slot := ledger.Slot{No: 0, From: noon, To: noon.Add(4 * time.Hour)}
	must(w, func(ctx context.Context, tx db.Tx) (bool, error) { return ledger.ArchiveNext(ctx, tx, slot) })
	row := must(w, func(ctx context.Context, tx db.Tx) (ledger.Archived, error) {
		row, ok, err := ledger.ArchivedOf(ctx, tx, s.nodeID, noon, noon.Add(time.Hour), ledger.ArchiveKey{})
		require.True(t, ok)
		return row, err
	})
	segments, err := row.UnpackSegments()
	require.NoError(t, err)
	require.Len(t, segments, 2)
	for i := range row.Packed {
		altered := row
		altered.Packed = slices.Clone(row.Packed)
		altered.Packed[i] ^= 1
		if _, err := altered.UnpackSegments(); err == nil {
			// Bits that mean nothing to the format: what is unpacked is the same.
			same, err := altered.UnpackSegments()
			require.NoError(t, err)
			require.Equal(t, segments, same)
		}
	}
}
