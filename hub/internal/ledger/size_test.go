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

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/protocol"
)

// sealer makes the segments of a node as an agent does: all members are cut together every 30 s, by a clock that is
// never exact.
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
		w.lease(m, billing.MaxLease)
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
		NodeId: s.nodeID, Incarnation: "0193f0a4-7f0b-7c3e-9a40-6f1f0b6f2f11", Number: s.number, PreviousSha256: s.previous,
		SealedAt: timestamppb.New(s.cutAt.Add(3 * time.Millisecond)),
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
				Sequence: s.sequence, MemberId: m.ID, Revision: 1, Meter: u.meter, Quantity: u.quantity, RunId: s.runs[i],
				LeaseNo:   1,
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
	read, err := ledger.ReadSegment(billing.Store{NodeID: s.nodeID, Incarnation: seg.GetIncarnation()}, seg, s.previous)
	require.NoError(t, err)
	read.Envelope = raw
	return read
}

// TestAYearOfUsageFitsOnADisk posts a slot of four nodes with ten members and three meters each, measures what a record
// takes as a row with its indexes, in its signed segment and in the archive, and what hours, postings and leases take,
// and multiplies.
func TestAYearOfUsageFitsOnADisk(t *testing.T) {
	const nodes, members, cuts = 4, 10, 432
	w := newWorld(t)
	w.credit("10000000")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds, HostBasisPoints: 7000}, "3.6")
	w.price(ledger.Price{Meter: protocol.MeterCPUSeconds, HostBasisPoints: 7000}, "0.1")
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
		must(w, func(ctx context.Context, tx db.Tx) ([]ledger.Posted, error) {
			return ledger.PostUsage(ctx, tx, w.now, batch...)
		})
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
	slotNo := func(table string) string { return fmt.Sprintf("%s_%d", table, slot.No) }
	raw, signed := w.rowBytes(records, slotNo("usage_records")), w.rowBytes(records, slotNo("usage_segments"))
	archived := w.rowBytes(records, "usage_archive")
	packed := float64(number(w, `SELECT sum(octet_length(packed))::INT8 FROM usage_archive`)) / records
	t.Logf("bytes a record: %.1f as a row with its indexes, %.1f in its signed segment, %.1f packed, %.1f in the "+
		"archive with all of its row",
		raw, signed, packed, archived)
	require.Less(t, raw, 330.0)
	require.Less(t, archived, 24.0)
	hour, posting, lease := w.sizeOfBooks()

	// A year of 1,000 nodes with ten members and three meters, two of them with a price, a record in 30 s, a lease in
	// twelve hours.
	const (
		running = 10_000
		daily   = running * 3 * 24 * 120
		year    = 365.0
	)
	total := 0.0
	for _, part := range []struct {
		what  string
		bytes float64
	}{
		{"raw records of 28 hours", daily * 28 / 24 * raw},
		{"signed segments of 28 hours", daily * 28 / 24 * signed},
		{"packed segments of 35 days", daily * 35 * archived},
		{"hours of a year", running * 3 * 24 * year * hour},
		{"postings of a year, two of usage and two of holds a member and day", running * 4 * year * posting},
		{"leases of 36 days", running * 2 * 36 * lease},
	} {
		t.Logf("%6.1f GB  %s", part.bytes/1e9, part.what)
		total += part.bytes
	}
	t.Logf("%6.1f GB  in all; %.0f bytes an hour's row, %.0f a posting with its entries, %.0f a lease", total/1e9, hour,
		posting, lease)
	require.Less(t, total, 190e9, "a disk of 200 GB, with room for the write-ahead log, events and everything else")
}

// rowBytes is what tables take with their indexes, divided by a number of rows.
func (w *world) rowBytes(rows float64, tables ...string) (bytes float64) {
	for _, table := range tables {
		bytes += float64(number(w, fmt.Sprintf(`SELECT pg_total_relation_size('%s')`, table)))
	}
	return bytes / rows
}

// sizeOfBooks is what an hour, a posting with its entries and a lease take. Hours and postings are made of more members
// than there are, so that pages are as full as on a hub in use.
func (w *world) sizeOfBooks() (hour, posting, lease float64) {
	w.now = w.now.Add(24 * time.Hour)
	w.flush()
	exec := func(sql string) {
		must(w, func(ctx context.Context, tx db.Tx) (int64, error) {
			tag, err := tx.Exec(ctx, sql)
			return tag.RowsAffected(), err
		})
	}
	exec(`INSERT INTO usage_hours SELECT node_id, gen_random_uuid(), hour, meter, price_id, quantity, records,
			charged_nanos, collected_nanos, written_off_nanos, host_nanos
		FROM usage_hours CROSS JOIN generate_series(1, 100)`)
	for range 100 {
		exec(`WITH p AS (INSERT INTO postings SELECT gen_random_uuid(), 'usage:' || gen_random_uuid(), kind, subject_kind,
				subject_id, org_id, project_id,
				app_instance_id, meter, price_id, period_from, period_to, corrects, description, correlation_id, created_at
				FROM postings WHERE kind = 'usage' LIMIT 40 RETURNING id)
			INSERT INTO entries SELECT p.id, l.leg, 'hold:' || p.id, 'EUR', l.leg FROM p CROSS
			JOIN generate_series(0, 2) AS l(leg)`)
	}
	rows := func(table string) float64 { return float64(number(w, `SELECT count(*) FROM `+table)) }
	return w.rowBytes(rows("usage_hours"), "usage_hours"), w.rowBytes(rows("postings"), "postings", "entries"),
		w.rowBytes(rows("leases"), "leases")
}

// Segments are unpacked as they were packed, and an altered row is noticed.
func TestArchivedSegmentsAreCheckedWhenTheyAreUnpacked(t *testing.T) {
	w := newWorld(t)
	w.credit("1000")
	s := newSealer(w, 1, noon)
	w.now = noon.Add(time.Hour)
	batch := []ledger.Segment{s.next(t), s.next(t)}
	must(w, func(ctx context.Context, tx db.Tx) ([]ledger.Posted, error) {
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

// A row of the archive has segments of its whole slot: it stays until the newest of them are old.
func TestTheArchiveOfASlotStaysUntilAllOfItIsOld(t *testing.T) {
	w := newWorld(t)
	w.credit("1000")
	s := newSealer(w, 1, noon)
	w.now = noon.Add(time.Hour)
	batch := []ledger.Segment{s.next(t)}
	must(w, func(ctx context.Context, tx db.Tx) ([]ledger.Posted, error) {
		return ledger.PostUsage(ctx, tx, w.now, batch...)
	})
	slot := ledger.Slot{No: 0, From: noon, To: noon.Add(4 * time.Hour)}
	must(w, func(ctx context.Context, tx db.Tx) (bool, error) { return ledger.ArchiveNext(ctx, tx, slot) })
	deleted := func(before time.Time) int {
		return must(w, func(ctx context.Context, tx db.Tx) (int, error) {
			_, n, err := ledger.DeleteOldArchive(ctx, tx, db.Old[ledger.ArchiveKey]{Before: before, Limit: 10})
			return n, err
		})
	}
	require.Zero(t, deleted(noon.Add(time.Hour)))
	require.Zero(t, deleted(slot.To))
	require.Equal(t, 1, deleted(slot.To.Add(time.Second)))
}
