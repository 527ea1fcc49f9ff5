package ledger

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// store is one life of a node's spool; a record's number counts within it.
type store = billing.Store

func compareStores(a, b store) int {
	return cmp.Or(strings.Compare(a.NodeID, b.NodeID), strings.Compare(a.Incarnation, b.Incarnation))
}

// Segment is a node's sealed segment, read and ready to be billed. ReadSegment makes it.
type Segment struct {
	store   store
	number  uint64
	records []billing.Record
	passed  int64
	// envelope is the segment as its node signed it; nil where nobody keeps it.
	envelope []byte
}

// Signed returns the segment with the envelope that its node signed: PostUsage keeps it as evidence.
func (s Segment) Signed(envelope []byte) Segment {
	s.envelope = envelope
	return s
}

// Len is how many records it has.
func (s Segment) Len() int { return len(s.records) }

// Numbers are those of its first and last record; 0 where it has none.
func (s Segment) Numbers() (first, last uint64) {
	if len(s.records) == 0 {
		return 0, 0
	}
	return uint64(s.records[0].Sequence), uint64(s.records[len(s.records)-1].Sequence)
}

// Passed is the segment with the number up to which all records of its store count as posted once it is: up to the mark
// of its chain. That keeps the ranges of posted numbers of one store few, whatever numbers its node chooses: one up to
// the mark, and at most one for each segment beyond it, of which a chain takes no more than usagechain.MaxAhead.
func (s Segment) Passed(number uint64) Segment {
	s.passed = int64(number)
	return s
}

// ReadSegment reads a segment without a look at the books, so that many can be read at once while others are billed.
// Its numbers must be one run without a gap: one that is not is refused, for good.
func ReadSegment(nodeID, incarnation string, seg *protocol.UsageSegment) (Segment, error) {
	records, err := billing.ReadRecords(nodeID, incarnation, seg)
	if err != nil {
		return Segment{}, fault.New(fault.Unprocessable, "segment_numbering", "The records of a usage segment are not "+
			"numbered in a row.", err).Permanent()
	}
	return Segment{
		store: store{NodeID: nodeID, Incarnation: incarnation}, number: seg.GetNumber(), records: records,
	}, nil
}

// PostUsage bills segments, of one node or of many, in the caller's transaction: usage rows, hours and the signed
// segments, with one statement a table however many segments there are. The journal follows with PostPending. Records
// that were posted before, or twice here, are skipped; it returns how many were not. Nothing that a node says about
// usage makes it fail: what cannot be billed goes to suspense with a reason, so that a bad record never blocks the ones
// behind it. Closed members whose last record is here now are settled by SettleFinal.
func PostUsage(ctx context.Context, tx db.Tx, now time.Time, segments ...Segment) (posted int, err error) {
	var stores []store
	for _, s := range segments {
		stores = append(stores, s.store)
	}
	slices.SortFunc(stores, compareStores)
	stores = slices.Compact(stores)
	if err := takeTurns(ctx, tx, stores); err != nil {
		return 0, err
	}
	before, err := sequencesOf(ctx, tx, stores)
	if err != nil {
		return 0, err
	}
	slot, err := CurrentSlot(ctx, tx, now)
	if err != nil {
		return 0, err
	}
	if err := keepSegments(ctx, tx, slot, segments); err != nil {
		return 0, err
	}
	records, after := unposted(segments, before)
	if len(records) == 0 {
		return 0, saveSequences(ctx, tx, before, after)
	}
	b, err := loadBatch(ctx, tx, records, now.UTC().Truncate(time.Microsecond))
	if err != nil {
		return 0, err
	}
	b.slot = slot
	if err := b.charge(ctx, tx, records); err != nil {
		return 0, err
	}
	if err := saveSequences(ctx, tx, before, after); err != nil {
		return 0, err
	}
	return len(records), nil
}

// sequenceRange is a run of posted record numbers, both ends included.
type sequenceRange struct{ from, to int64 }

func (r sequenceRange) compareFrom(from int64) int { return cmp.Compare(r.from, from) }

// has reports whether one of sorted ranges holds a number.
func has(ranges []sequenceRange, sequence int64) bool {
	n, found := slices.BinarySearchFunc(ranges, sequence, sequenceRange.compareFrom)
	return found || n > 0 && sequence <= ranges[n-1].to
}

// unposted returns the records whose numbers are in no range yet, and the ranges with them and with what the segments
// pass.
func unposted(segments []Segment,
	before map[store][]sequenceRange,
) (fresh []*billing.Record, after map[store][]sequenceRange) {
	after = maps.Clone(before)
	all := 0
	for _, seg := range segments {
		all += len(seg.records)
	}
	fresh = make([]*billing.Record, 0, all)
	for _, seg := range segments {
		posted := after[seg.store]
		var added []sequenceRange
		for i := range seg.records {
			r := &seg.records[i]
			if has(posted, r.Sequence) {
				continue
			}
			fresh = append(fresh, r)
			if n := len(added); n > 0 && added[n-1].to+1 == r.Sequence {
				added[n-1].to = r.Sequence
			} else {
				added = append(added, sequenceRange{r.Sequence, r.Sequence})
			}
		}
		if len(added) > 0 {
			after[seg.store] = joinRanges(posted, added)
		}
	}
	for _, seg := range segments {
		if r := after[seg.store]; seg.passed > 0 && (len(r) == 0 || r[0].from > 1 || r[0].to < seg.passed) {
			after[seg.store] = joinRanges(r, []sequenceRange{{1, seg.passed}})
		}
	}
	return fresh, after
}

// joinRanges joins what overlaps or touches, in order.
func joinRanges(a, b []sequenceRange) []sequenceRange {
	all := slices.Concat(a, b)
	slices.SortFunc(all, func(a, b sequenceRange) int { return cmp.Compare(a.from, b.from) })
	var out []sequenceRange
	for _, r := range all {
		if n := len(out); n > 0 && r.from <= out[n-1].to+1 {
			out[n-1].to = max(out[n-1].to, r.to)
			continue
		}
		out = append(out, r)
	}
	return out
}
