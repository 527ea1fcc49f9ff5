package ledger

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/rating"
)

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

// batch is segments being billed together: what the database said of their subjects, and what is to be written back.
type batch struct {
	now time.Time

	subjects map[string]*subject
	// leases are ordered by number; windows are theirs, and leased are the windows joined.
	leases   map[string][]lease
	windows  map[string]rating.Leases
	leased   map[string][]rating.Interval
	holds    map[string]hold
	billed   map[coverageKey]*billedTime
	accruals map[accrualKey]rating.Accrual

	added    map[accrualKey]*addition
	usage    []usageRow
	suspense []suspenseRow
	postings []Posting
	drawn    map[string]hold
	finals   map[string]finalMark
}

// addition is what a batch adds to an accrual.
type addition struct {
	quantity int64
	price    rating.Price
	// posting is what came of it, not valid for nothing.
	posting pgtype.UUID
	// With its store, the number of the first record names what is posted: a record is posted once, so no key comes twice.
	incarnation string
	sequence    int64
}

// usageRow is a record with what of it was accepted, and what it was first added to, nil for nothing.
type usageRow struct {
	*record
	accepted int64
	subject  *subject
	source   string
	added    *addition
}

type suspenseRow struct {
	*record
	piece piece
}

// billedTime is what is billed of one key: as the database has it, and with what the batch adds.
type billedTime struct {
	// since is how far back the batch looks: the earliest beginning of the key's records. One node with an old spool must not make the
	// others' history be read.
	since  time.Time
	stored []rating.Interval
	*rating.Coverage
	// outOfOrder counts what the batch adds before what is billed already, inHour its records of an hour.
	outOfOrder int
	hour       time.Time
	inHour     int
}

func loadBatch(ctx context.Context, tx db.Tx, records []*record, now time.Time) (*batch, error) {
	b := &batch{
		now: now, added: map[accrualKey]*addition{}, drawn: map[string]hold{}, finals: map[string]finalMark{},
		leases: map[string][]lease{}, windows: map[string]rating.Leases{}, leased: map[string][]rating.Interval{},
	}
	b.usage = make([]usageRow, 0, len(records))
	var err error
	if b.subjects, err = subjectsByID(ctx, tx, namedMembers(records)); err != nil {
		return nil, err
	}
	ids, since := b.reach(records)
	if err := b.loadLeases(ctx, tx, ids, since); err != nil {
		return nil, err
	}
	if b.holds, err = holdsOf(ctx, tx, ids); err != nil {
		return nil, err
	}
	return b, loadCoverage(ctx, tx, b.billed)
}

// reach notes the key of each record and how far back the batch looks, for keys and for the members that it returns. Only what may be
// billed counts: anybody's record may name any member and any time.
func (b *batch) reach(records []*record) (ids []string, since []time.Time) {
	members := map[string]time.Time{}
	b.billed = map[coverageKey]*billedTime{}
	for _, r := range records {
		r.billed = nil // of an earlier attempt of the transaction
		s, reason := b.subjectOf(r)
		if reason != "" || malformed(r) != "" {
			continue
		}
		if claim := s.claim(); !r.span.To.After(claim.From) || !r.span.From.Before(claim.To) {
			continue
		}
		from := latest(r.span.From, s.OpenedAt)
		if at, known := members[s.ID]; !known || from.Before(at) {
			members[s.ID] = from
		}
		key := r.coverage()
		r.billed = b.billed[key]
		if r.billed == nil {
			r.billed = &billedTime{since: from}
			b.billed[key] = r.billed
		}
		if from.Before(r.billed.since) {
			r.billed.since = from
		}
	}
	ids = slices.Sorted(maps.Keys(members))
	for _, id := range ids {
		since = append(since, members[id])
	}
	return ids, since
}

// namedMembers are the ids that records name, as far as they are ids at all.
func namedMembers(records []*record) []string {
	named, last := map[string]bool{}, ""
	for _, r := range records {
		if r.memberID == last {
			continue
		}
		last = r.memberID
		if _, known := named[r.memberID]; !known {
			named[r.memberID] = db.IsID(r.memberID)
		}
	}
	maps.DeleteFunc(named, func(_ string, isID bool) bool { return !isID })
	return slices.Sorted(maps.Keys(named))
}

func (b *batch) loadLeases(ctx context.Context, tx db.Tx, ids []string, since []time.Time) error {
	all, err := leasesOf(ctx, tx, ids, since)
	if err != nil {
		return err
	}
	for _, l := range all {
		b.leases[l.subjectID] = append(b.leases[l.subjectID], l)
	}
	for id, leases := range b.leases {
		windows, spans := make([]rating.Window, len(leases)), make([]rating.Interval, len(leases))
		for i, l := range leases {
			windows[i], spans[i] = rating.Window{LeaseNo: l.no, Interval: l.window()}, l.window()
		}
		b.windows[id], b.leased[id] = rating.NewLeases(windows), rating.Union(spans)
	}
	return nil
}

// subjectOf is the member that a record is for, or why its node may not bill it.
func (b *batch) subjectOf(r *record) (s *subject, reason string) {
	s, known := b.subjects[r.memberID]
	switch {
	case !known || s.Kind != Member:
		return nil, SuspenseUnknownSubject
	case s.NodeID != r.store.nodeID:
		return nil, SuspenseWrongNode
	}
	return s, ""
}

// take holds one record against what it may bill, and puts every part of it where it belongs.
func (b *batch) take(r *record) {
	s, reason := b.subjectOf(r)
	if reason != "" {
		b.suspend(r, piece{r.span, r.quantity, reason})
		return
	}
	if r.final {
		b.finals[s.ID] = finalMark{r.store.incarnation, r.sequence}
	}
	if r.quantity == 0 && r.span.Length() == 0 && !r.span.From.IsZero() {
		return // a mark, no usage
	}
	row := usageRow{record: r, subject: s, source: SourceAppRuntime}
	var accepted []rating.Interval
	for _, p := range clip(r, s.Subject, bounds{b.now, s.claim(), b.leased[s.ID], r.billed, r.fragmented()}) {
		if p.reason != "" {
			if p.quantity != 0 {
				b.suspend(r, p)
			}
			continue
		}
		row.accepted += p.quantity
		accepted = append(accepted, p.span)
		if a := b.accrue(s, r, p); row.added == nil {
			row.added = a
		}
	}
	if len(accepted) == 0 {
		return
	}
	r.billed.inHour++
	for _, span := range accepted {
		if r.billed.Before(span.From) {
			r.billed.outOfOrder++
		}
		r.billed.Add(span)
	}
	b.usage = append(b.usage, row)
}

const (
	// maxSpans bounds the intervals of billed time of one key that a batch looks at. An honest node's begin where its records do.
	maxSpans = 10_000
	// maxOutOfOrder bounds how often a batch adds to one key before what is billed already. A node seals its records in order.
	maxOutOfOrder = 1000
	// maxRecordsPerHour bounds a key's records of one hour in a batch: one a second, where a node makes one in thirty.
	maxRecordsPerHour = 3600
	// maxPieces bounds the pieces that billed time cuts one record into.
	maxPieces = 32
)

// fragmented reports whether a record is one too many of what no honest meter makes: each would cost all nodes' batches time.
func (r *record) fragmented() bool {
	t := r.billed
	if t == nil {
		return false
	}
	if hour := r.span.From.Truncate(time.Hour); hour.After(t.hour) {
		t.hour, t.inHour = hour, 0
	}
	return len(t.Spans()) >= maxSpans || t.outOfOrder >= maxOutOfOrder || t.inHour >= maxRecordsPerHour
}

func (b *batch) suspend(r *record, p piece) { b.suspense = append(b.suspense, suspenseRow{r, p}) }

// suspendedTotal is usage of one member and meter that its own node measured and nobody is billed for.
type suspendedTotal struct{ subjectID, meter string }

func (k suspendedTotal) compare(o suspendedTotal) int {
	return cmp.Or(strings.Compare(k.subjectID, o.subjectID), strings.Compare(k.meter, o.meter))
}

// suspended sums what the batch adds to suspense, for those whose lease it counts against: the node has counted it there. Usage that
// was billed before, and what another node says, is not among it. A sum is bounded by what the node can have measured since the
// member was opened.
func (b *batch) suspended() (added, most map[suspendedTotal]int64) {
	added, most = map[suspendedTotal]int64{}, map[suspendedTotal]int64{}
	for _, row := range b.suspense {
		s, reason := b.subjectOf(row.record)
		if reason != "" || row.piece.reason == SuspenseAlreadyBilled || row.piece.quantity <= 0 {
			continue
		}
		k := suspendedTotal{s.ID, row.meter}
		if _, seen := most[k]; !seen {
			most[k] = s.measurable(row.meter, b.now)
		}
		added[k] = min(added[k]+min(row.piece.quantity, most[k]), most[k])
	}
	return added, most
}

// maxSuspended bounds a total, so that two of them can be added.
const maxSuspended = math.MaxInt64 / 2

// measurable is the most of a meter that the member's node can have measured by now; nothing where the limit is unknown, as no hold
// covers such a meter.
func (s *subject) measurable(meter string, now time.Time) int64 {
	most, ok := mostOf(s.Subject, meter, max(now.Add(maxClockSkew).Sub(s.OpenedAt).Microseconds(), 0))
	if !ok {
		return maxSuspended
	}
	return min(most, maxSuspended)
}

// accrue adds an accepted piece to its hours, at the prices that its leases froze; it returns the first addition. What has no
// price is recorded and not charged.
func (b *batch) accrue(s *subject, r *record, p piece) (first *addition) {
	windows := b.windows[s.ID]
	if no, ok := windows.Whole(p.span, r.leaseNo); ok {
		return b.accrueAt(s, r, p.span, p.quantity, no)
	}
	for _, by := range windows.Divide(p.span, p.quantity, r.leaseNo) {
		if a := b.accrueAt(s, r, by.Interval, by.Quantity, by.LeaseNo); first == nil {
			first = a
		}
	}
	return first
}

func (b *batch) accrueAt(s *subject, r *record, span rating.Interval, quantity, leaseNo int64) (first *addition) {
	price, ok := b.price(s.ID, leaseNo, r.meter)
	if !ok {
		return nil
	}
	for _, part := range rating.Split(span, quantity, nil) {
		k := accrualKey{s.ID, r.meter, price.ID, part.Hour}
		a, ok := b.added[k]
		if !ok {
			a = &addition{price: price, incarnation: r.store.incarnation, sequence: r.sequence}
			b.added[k] = a
		}
		a.quantity += part.Quantity
		if first == nil {
			first = a
		}
	}
	return first
}

// price is the one that a lease froze for a meter.
func (b *batch) price(subjectID string, leaseNo int64, meter string) (rating.Price, bool) {
	leases := b.leases[subjectID]
	at, found := slices.BinarySearchFunc(leases, leaseNo, func(l lease, no int64) int { return cmp.Compare(l.no, no) })
	if !found {
		return rating.Price{}, false
	}
	for _, f := range leases[at].prices {
		if f.Meter == meter {
			return f.rated(leases[at].currency), true
		}
	}
	return rating.Price{}, false
}

// rate turns what was added to accruals into postings, in a fixed order: where a hold runs out, the earliest hour is paid
// first.
func (b *batch) rate() error {
	for _, k := range slices.SortedFunc(maps.Keys(b.added), accrualKey.compare) {
		h, s, a := b.holds[k.subjectID], b.subjects[k.subjectID], b.added[k]
		next, d, err := rating.Accrue(b.accruals[k], a.price, a.quantity, h.balance())
		if errors.Is(err, rating.ErrOverflow) {
			hour := rating.Interval{From: k.hour, To: k.hour.Add(time.Hour)}
			b.suspend(&record{store: store{s.NodeID, a.incarnation}, memberID: k.subjectID, meter: k.meter, span: hour}, piece{hour, a.quantity, SuspenseOutOfRange})
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
		key := fmt.Sprintf("usage:%s:%s:%s:%s:%s:%d", s.ID, k.meter, k.priceID, k.hour.Format("2006-01-02T15"), a.incarnation, a.sequence)
		postings, err := postDelta(key, *s, h, a.price, k, d, b.now)
		if err != nil {
			return err
		}
		b.postings = append(b.postings, postings...)
		if len(postings) > 0 {
			a.posting = id(postings[0].ID)
		}
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
	if err := insertUsage(ctx, tx, b.usage, b.now); err != nil {
		return err
	}
	if err := insertSuspense(ctx, tx, b.suspense, b.now); err != nil {
		return err
	}
	if added, most := b.suspended(); len(added) > 0 {
		if err := addSuspended(ctx, tx, added, most); err != nil {
			return err
		}
		if err := hastenRenewals(ctx, tx, added, b.now); err != nil {
			return err
		}
	}
	if err := saveCoverage(ctx, tx, b.billed); err != nil {
		return err
	}
	changed := make(map[accrualKey]rating.Accrual, len(b.added))
	for k := range b.added {
		changed[k] = b.accruals[k]
	}
	if err := upsertAccruals(ctx, tx, changed); err != nil {
		return err
	}
	if err := drawHolds(ctx, tx, b.drawn); err != nil {
		return err
	}
	if err := setFinals(ctx, tx, b.finals); err != nil {
		return err
	}
	return insertPostings(ctx, tx, b.postings...)
}
