package ledger

import (
	"cmp"
	"context"
	"errors"
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
	return cmp.Or(strings.Compare(k.subjectID, o.subjectID), k.hour.Compare(o.hour), strings.Compare(k.meter, o.meter),
		strings.Compare(k.priceID, o.priceID))
}

// coverageKey is what a stretch of time is billed once for.
type coverageKey struct{ subjectID, meter, runID string }

// batch is segments being billed together: what the database said of their subjects, and what is to be written back.
type batch struct {
	now time.Time
	// slot is where the raw usage goes.
	slot Slot

	subjects map[string]*subject
	// leases are ordered by number; windows are theirs, and leased are the windows joined.
	leases   map[string][]lease
	windows  map[string]rating.Leases
	leased   map[string][]rating.Interval
	holds    map[string]hold
	billed   map[coverageKey]*billedTime
	accruals map[accrualKey]rating.Accrual
	// hours count what was accepted of a member and meter in an hour: what the database has, and what the batch adds.
	hours map[hourKey]*hourCount

	added    map[accrualKey]*addition
	usage    []usageRow
	suspense []suspenseRow
	pending  map[pendingKey]*pendingPosting
	drawn    map[string]hold
	finals   map[string]finalMark
}

type hourKey struct {
	memberID, meter string
	hour            time.Time
}

// hourCount is how many records began in an hour, and their quantity, over all runs and prices.
type hourCount struct{ records, quantity int64 }

// addition is what a batch adds to an accrual: a quantity, and the records that began in its hour. price is empty where
// usage has none.
type addition struct {
	quantity, records int64
	price             rating.Price
	// posting is what charges it, not valid for nothing.
	posting pgtype.UUID
}

// usageRow is a record with what of it was accepted, and what it was first added to, nil for nothing.
type usageRow struct {
	*record
	accepted int64
	subject  *subject
	added    *addition
}

type suspenseRow struct {
	*record
	piece piece
}

// billedTime is what is billed of one key: as the database has it, and with what the batch adds.
type billedTime struct {
	// since is how far back the batch looks: the earliest beginning of the key's records. One node with an old spool must
	// not make the others' history be read.
	since  time.Time
	stored []rating.Interval
	*rating.Coverage
	// outOfOrder counts what the batch adds before what is billed already.
	outOfOrder int
}

func loadBatch(ctx context.Context, tx db.Tx, records []*record, now time.Time) (*batch, error) {
	b := &batch{
		now: now, added: map[accrualKey]*addition{}, drawn: map[string]hold{}, finals: map[string]finalMark{},
		leases: map[string][]lease{}, windows: map[string]rating.Leases{}, leased: map[string][]rating.Interval{},
		hours: map[hourKey]*hourCount{},
	}
	b.usage = make([]usageRow, 0, len(records))
	var err error
	if b.subjects, err = subjectsByID(ctx, tx, namedMembers(records)); err != nil {
		return nil, err
	}
	ids, reach := b.reach(records)
	if err := b.loadLeases(ctx, tx, ids, reach); err != nil {
		return nil, err
	}
	if b.holds, err = holdsOf(ctx, tx, ids); err != nil {
		return nil, err
	}
	if b.accruals, err = loadHours(ctx, tx, ids, reach, b.hours); err != nil {
		return nil, err
	}
	if b.pending, err = pendingOf(ctx, tx, ids); err != nil {
		return nil, err
	}
	return b, loadCoverage(ctx, tx, b.billed)
}

// reach notes the key of each record and how far back the batch looks, for keys and for the members, which it returns
// with the time of their records. Only what may be billed counts: anybody's record may name any member and any time.
func (b *batch) reach(records []*record) (ids []string, spans []rating.Interval) {
	members := map[string]rating.Interval{}
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
		span, known := members[s.ID]
		if !known || from.Before(span.From) {
			span.From = from
		}
		span.To = latest(span.To, r.span.To)
		members[s.ID] = span
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
		spans = append(spans, members[id])
	}
	return ids, spans
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

func (b *batch) loadLeases(ctx context.Context, tx db.Tx, ids []string, reach []rating.Interval) error {
	since := make([]time.Time, len(reach))
	for i, span := range reach {
		since[i] = span.From
	}
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
	pieces := clip(r, s.Subject, bounds{b.now, s.claim(), b.leased[s.ID], r.billed, r.fragmented()})
	b.put(s, r, b.withinHour(s, r, pieces))
}

// withinHour bounds what is accepted of a member and meter in one hour, however many runs its node names.
func (b *batch) withinHour(s *subject, r *record, pieces []piece) []piece {
	hour, ok := firstHour(pieces)
	if !ok {
		return pieces
	}
	k := hourKey{r.memberID, r.meter, hour}
	count := b.hours[k]
	if count == nil {
		count = &hourCount{}
		b.hours[k] = count
	}
	if count.records >= maxRecordsPerHour {
		return []piece{{r.span, r.quantity, SuspenseTooFragmented}}
	}
	count.records++
	most := hourMost(r, s.Subject)
	for i := range pieces {
		p := &pieces[i]
		if p.reason != "" {
			continue
		}
		if room := max(most-count.quantity, 0); p.quantity > room {
			pieces = append(pieces, piece{p.span, p.quantity - room, SuspenseBeyondLimit})
			p = &pieces[i]
			p.quantity = room
		}
		count.quantity += p.quantity
	}
	return pieces
}

// firstHour is the hour in which what is accepted begins; ok is false where nothing is.
func firstHour(pieces []piece) (hour time.Time, ok bool) {
	for _, p := range pieces {
		if p.reason == "" {
			return hourOf(p.span.From), true
		}
	}
	return hour, false
}

// put suspends the pieces of a record that have a reason, and bills the others.
func (b *batch) put(s *subject, r *record, pieces []piece) {
	row := usageRow{record: r, subject: s}
	for _, p := range pieces {
		if p.reason != "" {
			if p.quantity != 0 {
				b.suspend(r, p)
			}
			continue
		}
		row.accepted += p.quantity
		a := b.accrue(s, r, p)
		if row.added == nil && a != nil {
			row.added = a
			a.records++
		}
		if r.billed.Before(p.span.From) {
			r.billed.outOfOrder++
		}
		r.billed.Add(p.span)
	}
	if row.added != nil {
		b.usage = append(b.usage, row)
	}
}

const (
	// maxSpans bounds the intervals of billed time of one key that a batch looks at. An honest node's begin where its
	// records do.
	maxSpans = 10_000
	// maxOutOfOrder bounds how often a batch adds to one key before what is billed already. A node seals its records in
	// order.
	maxOutOfOrder = 1000
	// maxRecordsPerHour bounds the records of a member and meter that begin in one hour: one a second, where a node makes
	// one in thirty.
	maxRecordsPerHour = 3600
	// hourSlack is what the records of one hour may be longer than it: each may overrun its limit a little.
	hourSlack = 3 * time.Minute
	// maxPieces bounds the pieces that billed time cuts one record into.
	maxPieces = 32
)

// fragmented reports whether a record is one too many of what no honest meter makes: each would cost all nodes' batches
// time.
func (r *record) fragmented() bool {
	t := r.billed
	return t != nil && (len(t.Spans()) >= maxSpans || t.outOfOrder >= maxOutOfOrder)
}

func (b *batch) suspend(r *record, p piece) { b.suspense = append(b.suspense, suspenseRow{r, p}) }

// suspendedTotal is usage of one member and meter that its own node measured and nobody is billed for.
type suspendedTotal struct{ subjectID, meter string }

func (k suspendedTotal) compare(o suspendedTotal) int {
	return cmp.Or(strings.Compare(k.subjectID, o.subjectID), strings.Compare(k.meter, o.meter))
}

// suspended sums what the batch adds to suspense, for those whose lease it counts against: the node has counted it
// there. Usage that was billed before, and what another node says, is not among it. A sum is bounded by what the node
// can have measured since the member was opened.
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

// measurable is the most of a meter that the member's node can have measured by now; nothing where the limit is
// unknown, as no hold covers such a meter.
func (s *subject) measurable(meter string, now time.Time) int64 {
	most, ok := mostOf(s.Subject, meter, max(now.Add(maxClockSkew).Sub(s.OpenedAt).Microseconds(), 0))
	if !ok {
		return maxSuspended
	}
	return min(most, maxSuspended)
}

// accrue adds an accepted piece to its hours, at the prices that its leases froze; it returns the first addition. What
// has no price adds up and is not charged.
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
	price, _ := b.price(s.ID, leaseNo, r.meter)
	for _, part := range rating.Split(span, quantity, nil) {
		k := accrualKey{s.ID, r.meter, price.ID, part.Hour}
		a, ok := b.added[k]
		if !ok {
			a = &addition{price: price}
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

// rate charges what was added to the hours, in a fixed order: where a hold runs out, the earliest hour is paid first.
func (b *batch) rate() error {
	for _, k := range slices.SortedFunc(maps.Keys(b.added), accrualKey.compare) {
		h, s, a := b.holds[k.subjectID], b.subjects[k.subjectID], b.added[k]
		next, d, err := a.rate(b.accruals[k], h)
		if errors.Is(err, rating.ErrOverflow) {
			hour := rating.Interval{From: k.hour, To: k.hour.Add(time.Hour)}
			b.suspend(&record{store: store{nodeID: s.NodeID}, memberID: k.subjectID, meter: k.meter, span: hour},
				piece{hour, a.quantity, SuspenseOutOfRange})
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
		a.posting = addPending(b.pending, k, a.price.Currency, d, b.now)
	}
	return nil
}

// rate adds to an accrual; what has no price costs nothing.
func (a *addition) rate(to rating.Accrual, h hold) (rating.Accrual, rating.Delta, error) {
	if a.price.ID != "" {
		return rating.Accrue(to, a.price, a.quantity, h.balance())
	}
	if to.Quantity > math.MaxInt64-a.quantity {
		return to, rating.Delta{}, rating.ErrOverflow
	}
	to.Quantity += a.quantity
	return to, rating.Delta{}, nil
}

// save writes the whole batch, one statement a table.
func (b *batch) save(ctx context.Context, tx db.Tx) error {
	if err := insertUsage(ctx, tx, b.slot, b.usage); err != nil {
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
	if err := b.saveHours(ctx, tx); err != nil {
		return err
	}
	if err := savePending(ctx, tx, b.pending); err != nil {
		return err
	}
	if err := drawHolds(ctx, tx, b.drawn); err != nil {
		return err
	}
	return setFinals(ctx, tx, b.finals)
}

func (b *batch) saveHours(ctx context.Context, tx db.Tx) error {
	hours := make(map[accrualKey]hourRow, len(b.added))
	for k, a := range b.added {
		hours[k] = hourRow{b.accruals[k], a.records}
	}
	return upsertHours(ctx, tx, hours)
}
