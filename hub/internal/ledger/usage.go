package ledger

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/usagechain"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// Segment is a node's sealed segment, read and ready to be billed. ReadSegment makes it.
type Segment struct {
	Store billing.Store
	Link  usagechain.Link
	// Envelope is the segment as its node signed it (protobuf of protocol.Envelope), kept as evidence; nil in tests that
	// keep none.
	Envelope []byte
	records  []billing.Record
}

// Len is the number of records.
func (s Segment) Len() int { return len(s.records) }

// ReadSegment reads a segment without reading the books, so that many can be read at once while others are billed.
// digest is the SHA-256 of the signed payload. Record numbers with a gap are a permanent error.
func ReadSegment(of billing.Store, seg *protocol.UsageSegment, digest []byte) (Segment, error) {
	records, err := billing.ReadRecords(of.NodeID, of.Incarnation, seg)
	if err != nil {
		return Segment{}, fault.New(fault.Unprocessable, codeSegmentNumbering, "The records of a usage segment are not "+
			"numbered in a row.", err).Permanent()
	}
	out := Segment{
		Store:   of,
		Link:    usagechain.Link{Number: seg.GetNumber(), SHA256: digest, Previous: seg.GetPreviousSha256()},
		records: records,
	}
	if len(records) > 0 {
		out.Link.First, out.Link.Last = uint64(records[0].Sequence), uint64(records[len(records)-1].Sequence)
	}
	return out, nil
}

// Posted is the result of one segment.
type Posted struct {
	// Reached is how far the chain of its store is posted.
	Reached Watermark
	// New is false for a segment that was posted before, and for one with an error.
	New bool
	// Err is why the segment was not posted; the others of its batch are.
	Err error
}

// PostUsage posts segments, of one node or of many, in the caller's transaction, which may be a db.LockTx: it locks the
// chain of each store, then each member that is billed, before it reads what belongs to them. A segment is posted when
// it is new to its chain; the chain is the only guard against posting one twice (docs/design/metering.md). Usage rows,
// hours and the signed segments are written with one statement a table. The journal follows with PostPending, and
// closed members whose last record is posted now are settled by SettleDue.
//
// Nothing that a node says about usage makes it fail: what cannot be billed goes to suspense with a reason, so that a
// bad record never blocks the ones behind it. The results are in the order of the segments.
func PostUsage(ctx context.Context, tx db.Tx, now time.Time, segments ...Segment) ([]Posted, error) {
	chains, err := lockChains(ctx, tx, segments, now)
	if err != nil {
		return nil, err
	}
	var fresh []Segment
	var records []*billing.Record
	results := make([]Posted, len(segments))
	for n, s := range segments {
		r := &results[n]
		if r.New, r.Err = chains[s.Store].accept(s.Link); r.New {
			fresh = append(fresh, s)
			for i := range s.records {
				records = append(records, &s.records[i])
			}
		}
	}
	for n, s := range segments {
		results[n].Reached = chains[s.Store].watermark
	}
	if len(fresh) == 0 {
		return results, nil
	}
	if err := bill(ctx, tx, fresh, records, now.UTC().Truncate(time.Microsecond)); err != nil {
		return nil, err
	}
	failpoint.Hit("hub/usage/posted")
	err = saveChains(ctx, tx, chains, now)
	failpoint.Hit("hub/usage/watermark_saved")
	return results, err
}

// SkipUsage counts segments of one store as posted without billing them, in the caller's transaction: they are set
// aside, and those behind them must not wait for them.
func SkipUsage(ctx context.Context, tx db.Tx, now time.Time, segments ...Segment) ([]Posted, error) {
	chains, err := lockChains(ctx, tx, segments, now)
	if err != nil {
		return nil, err
	}
	results := make([]Posted, len(segments))
	for n, s := range segments {
		results[n].New, results[n].Err = chains[s.Store].skip(s.Link)
	}
	for n, s := range segments {
		results[n].Reached = chains[s.Store].watermark
	}
	return results, saveChains(ctx, tx, chains, now)
}

// bill writes new segments to the current slot and charges their records.
func bill(ctx context.Context, tx db.Tx, segments []Segment, records []*billing.Record, now time.Time) error {
	slot, err := CurrentSlot(ctx, tx, now)
	if err != nil {
		return err
	}
	if err := keepSegments(ctx, tx, slot, segments); err != nil || len(records) == 0 {
		return err
	}
	b, err := loadBatch(ctx, tx, records, now)
	if err != nil {
		return err
	}
	b.slot = slot
	return b.charge(ctx, tx, records)
}
