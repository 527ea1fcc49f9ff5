package ledger

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/rating"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// PostUsage bills a node's segment: usage rows, accruals and postings, in the caller's transaction. Records that were posted
// before are skipped; posted is false when that is all of them. Nothing that a node says about usage makes it fail: what
// cannot be billed goes to suspense with a reason, so that a bad record never blocks the ones behind it. Only a segment
// whose own numbering is broken is refused, for good.
func PostUsage(ctx context.Context, tx db.Tx, nodeID, incarnation string, seg *protocol.UsageSegment, now time.Time) (posted bool, err error) {
	records, err := recordsOf(seg)
	if err != nil {
		return false, err
	}
	if err := takeTurn(ctx, tx, nodeID); err != nil {
		return false, err
	}
	done, err := sequences(ctx, tx, nodeID, incarnation)
	if err != nil {
		return false, err
	}
	records = slices.DeleteFunc(records, func(r record) bool { return within(r.sequence, done) })
	if len(records) == 0 {
		return false, nil
	}
	b, err := loadBatch(ctx, tx, nodeID, incarnation, records, now.UTC().Truncate(time.Microsecond))
	if err != nil {
		return false, err
	}
	for _, r := range records {
		b.take(r)
	}
	if err := b.rate(); err != nil {
		return false, err
	}
	if err := b.save(ctx, tx); err != nil {
		return false, err
	}
	if err := saveSequences(ctx, tx, nodeID, incarnation, done, records); err != nil {
		return false, err
	}
	return true, b.settleClosed(ctx, tx)
}

// recordsOf reads a segment. Its numbers must be one run without a gap.
func recordsOf(seg *protocol.UsageSegment) ([]record, error) {
	out := make([]record, len(seg.GetRecords()))
	for i, r := range seg.GetRecords() {
		out[i] = record{
			sequence: int64(r.GetSequence()), memberID: name(r.GetMemberId()), meter: name(r.GetMeter()), quantity: r.GetQuantity(),
			runID: name(r.GetRunId()), leaseNo: int64(r.GetLeaseNo()), revision: int64(r.GetRevision()), final: r.GetFinal(),
			span: rating.Interval{From: when(r.GetStartedAt()), To: when(r.GetEndedAt())},
		}
		if out[i].sequence <= 0 || i > 0 && out[i].sequence != out[i-1].sequence+1 {
			return nil, fault.New(fault.Unprocessable, "segment_numbering", "The records of a usage segment are not numbered in a row.",
				fmt.Errorf("segment %d, record %d", seg.GetNumber(), i)).Lasting()
		}
	}
	return out, nil
}

// maxNameBytes bounds ids and names in a record; a longer one is cut, so that it can be written down at all.
const maxNameBytes = 128

// name makes a node's text fit for the database, which takes no NUL.
func name(s string) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, ""), "\x00", "")
	if len(s) > maxNameBytes {
		s = strings.ToValidUTF8(s[:maxNameBytes], "")
	}
	return s
}

// when reads a wire time; what cannot be a time of usage becomes the zero time, which is malformed.
func when(ts interface {
	IsValid() bool
	AsTime() time.Time
},
) time.Time {
	if !ts.IsValid() {
		return time.Time{}
	}
	t := ts.AsTime().Truncate(time.Microsecond)
	if t.Year() < 2000 || t.Year() > 9000 {
		return time.Time{}
	}
	return t
}

// accrualKey is where quantities add up.
type accrualKey struct {
	subjectID string
	meter     string
	priceID   string
	hour      time.Time
}

func (k accrualKey) compare(o accrualKey) int {
	return cmp.Or(strings.Compare(k.subjectID, o.subjectID), k.hour.Compare(o.hour), strings.Compare(k.meter, o.meter), strings.Compare(k.priceID, o.priceID))
}

// coverageKey is what a stretch of time is billed once for.
type coverageKey struct{ subjectID, meter, runID string }

// batch is one segment being billed: what the database said of its subjects, and what is to be written back.
type batch struct {
	nodeID      string
	incarnation string
	now         time.Time

	subjects map[string]subject
	leases   map[string][]lease
	holds    map[string]hold
	coverage map[coverageKey][]rating.Interval
	stored   map[coverageKey][]rating.Interval
	accruals map[accrualKey]rating.Accrual

	added    map[accrualKey]int64
	first    map[accrualKey]int64
	prices   map[accrualKey]rating.Price
	usage    []usageRow
	suspense []suspenseRow
	postings []Posting
	drawn    map[string]hold
	finals   map[string]finalMark
}

// usageRow is a record with what of it was accepted, and the accrual it first went to.
type usageRow struct {
	record
	accepted int64
	subject  subject
	source   string
	accrual  accrualKey
}

type suspenseRow struct {
	record
	piece piece
}

func loadBatch(ctx context.Context, tx db.Tx, nodeID, incarnation string, records []record, now time.Time) (*batch, error) {
	b := &batch{
		nodeID: nodeID, incarnation: incarnation, now: now,
		added: map[accrualKey]int64{}, first: map[accrualKey]int64{}, prices: map[accrualKey]rating.Price{}, drawn: map[string]hold{}, finals: map[string]finalMark{},
	}
	ids, from := map[string]bool{}, now
	for _, r := range records {
		if db.IsID(r.memberID) {
			ids[r.memberID] = true
		}
		if !r.span.From.IsZero() && r.span.From.Before(from) {
			from = r.span.From
		}
	}
	members := slices.Sorted(maps.Keys(ids))
	var err error
	if b.subjects, err = subjectsByID(ctx, tx, members); err != nil {
		return nil, err
	}
	leases, err := leasesOf(ctx, tx, members, from)
	if err != nil {
		return nil, err
	}
	b.leases = map[string][]lease{}
	for _, l := range leases {
		b.leases[l.subjectID] = append(b.leases[l.subjectID], l)
	}
	if b.holds, err = holdsOf(ctx, tx, members); err != nil {
		return nil, err
	}
	if b.stored, err = coverageOf(ctx, tx, members, from); err != nil {
		return nil, err
	}
	b.coverage = maps.Clone(b.stored)
	b.accruals, err = accrualsOf(ctx, tx, members, from.Truncate(time.Hour))
	return b, err
}

// take holds one record against what it may bill, and puts every part of it where it belongs.
func (b *batch) take(r record) {
	s, known := b.subjects[r.memberID]
	switch {
	case !known || s.Kind != Member:
		b.suspend(r, piece{r.span, r.quantity, SuspenseUnknownSubject})
		return
	case s.NodeID != b.nodeID:
		b.suspend(r, piece{r.span, r.quantity, SuspenseWrongNode})
		return
	}
	if r.final {
		b.finals[s.ID] = finalMark{b.incarnation, r.sequence}
	}
	if r.quantity == 0 && r.span.Length() == 0 && !r.span.From.IsZero() {
		return // a mark, no usage
	}
	key := coverageKey{s.ID, r.meter, coverageRun(r.meter, r.runID)}
	row := usageRow{record: r, subject: s, source: SourceAppRuntime}
	var accepted []rating.Interval
	for _, p := range clip(r, s.Subject, bounds{b.now, s.claim(), b.leased(s.ID), b.coverage[key]}) {
		if p.reason != "" {
			if p.quantity != 0 {
				b.suspend(r, p)
			}
			continue
		}
		row.accepted += p.quantity
		accepted = append(accepted, p.span)
		if k, ok := b.accrue(s, r, p); ok && row.accrual == (accrualKey{}) {
			row.accrual = k
		}
	}
	if len(accepted) > 0 {
		b.coverage[key] = rating.Union(append(slices.Clone(b.coverage[key]), accepted...))
		b.usage = append(b.usage, row)
	}
}

func (b *batch) suspend(r record, p piece) { b.suspense = append(b.suspense, suspenseRow{r, p}) }

func (b *batch) leased(subjectID string) []rating.Interval {
	var windows []rating.Interval
	for _, l := range b.leases[subjectID] {
		windows = append(windows, l.window())
	}
	return rating.Union(windows)
}

// accrue notes an accepted piece under its hours, at the price that its lease froze; it returns the first accrual. What has no
// price is recorded and not charged.
func (b *batch) accrue(s subject, r record, p piece) (first accrualKey, charged bool) {
	price, ok := b.price(s.ID, r, p)
	if !ok {
		return accrualKey{}, false
	}
	for i, part := range rating.Split(p.span, p.quantity, nil) {
		k := accrualKey{s.ID, r.meter, price.ID, part.Hour}
		if _, ok := b.added[k]; !ok {
			// With the incarnation this names what is posted: the same records are never posted twice for one accrual.
			b.first[k] = r.sequence
		}
		b.added[k] += part.Quantity
		b.prices[k] = price
		if i == 0 {
			first = k
		}
	}
	return first, true
}

// price is the one that the record's lease froze. A record with a number that is no lease's is rated by the lease that ran.
func (b *batch) price(subjectID string, r record, p piece) (rating.Price, bool) {
	var by *lease
	for i, l := range b.leases[subjectID] {
		if l.no == r.leaseNo {
			by = &b.leases[subjectID][i]
			break
		}
		if by == nil && len(rating.Intersect(p.span, []rating.Interval{l.window()})) > 0 {
			by = &b.leases[subjectID][i]
		}
	}
	if by == nil {
		return rating.Price{}, false
	}
	for _, f := range by.prices {
		if f.Meter == r.meter {
			return f.rated(by.currency), true
		}
	}
	return rating.Price{}, false
}

// rate turns what was added to accruals into postings, in a fixed order: where a hold runs out, the earliest hour is paid
// first.
func (b *batch) rate() error {
	posted := map[accrualKey]string{}
	for _, k := range slices.SortedFunc(maps.Keys(b.added), accrualKey.compare) {
		h, s := b.holds[k.subjectID], b.subjects[k.subjectID]
		next, d, err := rating.Accrue(b.accruals[k], b.prices[k], b.added[k], h.balance())
		if errors.Is(err, rating.ErrOverflow) {
			hour := rating.Interval{From: k.hour, To: k.hour.Add(time.Hour)}
			b.suspend(record{memberID: k.subjectID, meter: k.meter, span: hour}, piece{hour, b.added[k], SuspenseOutOfRange})
			delete(b.added, k)
			continue
		}
		if err != nil {
			return err
		}
		if d.CollectedNanos > 0 {
			h.posted += d.CollectedNanos
			b.drawn[h.id] = h
		}
		b.accruals[k], b.holds[k.subjectID] = next, h
		key := fmt.Sprintf("usage:%s:%s:%s:%s:%s:%d", s.ID, k.meter, k.priceID, k.hour.Format("2006-01-02T15"), b.incarnation, b.first[k])
		postings, err := postDelta(key, s, h, b.prices[k], k, d, b.now)
		if err != nil {
			return err
		}
		b.postings = append(b.postings, postings...)
		if len(postings) > 0 {
			posted[k] = postings[0].ID
		}
	}
	for i := range b.usage {
		b.usage[i].postingID = posted[b.usage[i].accrual]
	}
	return nil
}

// postDelta writes one accrual's change as postings: what the hold pays, shared with the host, and what is written off.
func postDelta(key string, s subject, h hold, price rating.Price, k accrualKey, d rating.Delta, now time.Time) ([]Posting, error) {
	var out []Posting
	if d.CollectedNanos > 0 {
		legs := []Leg{{holdAccount(h.id), price.Currency, -d.CollectedNanos}}
		for _, l := range []Leg{
			{accountRevenue, price.Currency, d.CollectedNanos - d.HostNanos},
			{hostAccount(s.NodeID), price.Currency, d.HostNanos},
		} {
			if l.Nanos != 0 {
				legs = append(legs, l)
			}
		}
		p, err := NewPosting(key, legs...)
		if err != nil {
			return nil, err
		}
		out = append(out, p.of(Usage, s, now).over(k.meter, k.priceID, k.hour))
	}
	if d.WrittenOffNanos > 0 {
		p, err := NewPosting(key+":write_off",
			Leg{accountRevenue, price.Currency, d.WrittenOffNanos}, Leg{accountWriteOff, price.Currency, -d.WrittenOffNanos})
		if err != nil {
			return nil, err
		}
		out = append(out, p.of(WriteOff, s, now).over(k.meter, k.priceID, k.hour))
	}
	return out, nil
}

// save writes the whole batch, one statement a table.
func (b *batch) save(ctx context.Context, tx db.Tx) error {
	if err := insertUsage(ctx, tx, b.usage, b.nodeID, b.incarnation, b.now); err != nil {
		return err
	}
	if err := insertSuspense(ctx, tx, b.suspense, b.nodeID, b.incarnation, b.now); err != nil {
		return err
	}
	if err := saveCoverage(ctx, tx, b.stored, b.coverage); err != nil {
		return err
	}
	changed := map[accrualKey]rating.Accrual{}
	for k := range b.added {
		changed[k] = b.accruals[k]
	}
	if err := upsertAccruals(ctx, tx, changed); err != nil {
		return err
	}
	if err := drawHolds(ctx, tx, b.drawn); err != nil {
		return err
	}
	for _, id := range slices.Sorted(maps.Keys(b.finals)) {
		if err := setFinal(ctx, tx, id, b.finals[id]); err != nil {
			return err
		}
	}
	return insertPostings(ctx, tx, b.postings...)
}

// settleClosed settles the node's closed members whose last record is now here.
func (b *batch) settleClosed(ctx context.Context, tx db.Tx) error {
	waiting, err := unsettledSubjects(ctx, tx, b.nodeID)
	if err != nil {
		return err
	}
	for _, s := range waiting {
		if err := settleFinal(ctx, tx, s, b.now); err != nil {
			return err
		}
	}
	return nil
}

// sequenceRange is a run of posted record numbers, both ends included.
type sequenceRange struct{ from, to int64 }

func within(sequence int64, ranges []sequenceRange) bool {
	return slices.ContainsFunc(ranges, func(r sequenceRange) bool { return r.from <= sequence && sequence <= r.to })
}

// joinSequences adds numbers to ranges and joins what touches.
func joinSequences(ranges []sequenceRange, records []record) []sequenceRange {
	all := slices.Clone(ranges)
	for _, r := range records {
		all = append(all, sequenceRange{r.sequence, r.sequence})
	}
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
