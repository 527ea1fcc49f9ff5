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
	leases   map[string][]lease
	// leased are the windows of a subject's leases, joined.
	leased   map[string][]rating.Interval
	holds    map[string]hold
	coverage map[coverageKey][]rating.Interval
	stored   map[coverageKey][]rating.Interval
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

// stretches is how far back a batch looks: for each member, and for each thing that is billed once, the earliest beginning of
// its records. One node with an old spool must not make the others' history be read.
type stretches[K comparable] map[K]time.Time

func (s stretches[K]) reach(k K, from time.Time) {
	if since, ok := s[k]; !ok || from.Before(since) {
		s[k] = from
	}
}

func loadBatch(ctx context.Context, tx db.Tx, records []*record, now time.Time) (*batch, error) {
	b := &batch{now: now, added: map[accrualKey]*addition{}, drawn: map[string]hold{}, finals: map[string]finalMark{}, leases: map[string][]lease{}, leased: map[string][]rating.Interval{}}
	members, billed := stretches[string]{}, stretches[coverageKey]{}
	b.usage = make([]usageRow, 0, len(records))
	for _, r := range records {
		if _, known := members[r.memberID]; !known && !db.IsID(r.memberID) {
			continue
		}
		from := r.span.From
		if from.IsZero() {
			from = now
		}
		members.reach(r.memberID, from)
		billed.reach(r.coverage(), from)
	}
	ids := slices.Sorted(maps.Keys(members))
	var err error
	if b.subjects, err = subjectsByID(ctx, tx, ids); err != nil {
		return nil, err
	}
	since := make([]time.Time, len(ids))
	for i, id := range ids {
		since[i] = members[id]
	}
	leases, err := leasesOf(ctx, tx, ids, since)
	if err != nil {
		return nil, err
	}
	for _, l := range leases {
		b.leases[l.subjectID] = append(b.leases[l.subjectID], l)
		b.leased[l.subjectID] = append(b.leased[l.subjectID], l.window())
	}
	for id, windows := range b.leased {
		b.leased[id] = rating.Union(windows)
	}
	if b.holds, err = holdsOf(ctx, tx, ids); err != nil {
		return nil, err
	}
	if b.stored, err = coverageOf(ctx, tx, billed); err != nil {
		return nil, err
	}
	b.coverage = make(map[coverageKey][]rating.Interval, len(billed))
	for key, spans := range b.stored {
		b.coverage[key] = slices.Clone(spans)
	}
	return b, nil
}

// take holds one record against what it may bill, and puts every part of it where it belongs.
func (b *batch) take(r *record) {
	s, known := b.subjects[r.memberID]
	switch {
	case !known || s.Kind != Member:
		b.suspend(r, piece{r.span, r.quantity, SuspenseUnknownSubject})
		return
	case s.NodeID != r.store.nodeID:
		b.suspend(r, piece{r.span, r.quantity, SuspenseWrongNode})
		return
	}
	if r.final {
		b.finals[s.ID] = finalMark{r.store.incarnation, r.sequence}
	}
	if r.quantity == 0 && r.span.Length() == 0 && !r.span.From.IsZero() {
		return // a mark, no usage
	}
	key := r.coverage()
	row := usageRow{record: r, subject: s, source: SourceAppRuntime}
	var accepted []rating.Interval
	for _, p := range clip(r, s.Subject, bounds{b.now, s.claim(), b.leased[s.ID], b.coverage[key]}) {
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
	if len(accepted) > 0 {
		b.coverage[key] = cover(b.coverage[key], accepted)
		b.usage = append(b.usage, row)
	}
}

// cover adds what was accepted to what is billed, in place. Mostly it goes on where the last ended, or is the first.
func cover(billed, accepted []rating.Interval) []rating.Interval {
	if len(accepted) == 1 && len(billed) == 0 {
		return accepted
	}
	if n := len(billed); len(accepted) == 1 && accepted[0].From.Equal(billed[n-1].To) {
		billed[n-1].To = accepted[0].To
		return billed
	}
	return rating.Union(slices.Concat(billed, accepted))
}

func (b *batch) suspend(r *record, p piece) { b.suspense = append(b.suspense, suspenseRow{r, p}) }

// suspended are the known members of which something went into suspense.
func (b *batch) suspended() []string {
	members := map[string]bool{}
	for _, s := range b.suspense {
		if _, known := b.subjects[s.memberID]; known && s.piece.reason != SuspenseAlreadyBilled {
			members[s.memberID] = true
		}
	}
	return slices.Sorted(maps.Keys(members))
}

// accrue notes an accepted piece under its hours, at the price that its lease froze; it returns the first. What has no price is
// recorded and not charged.
func (b *batch) accrue(s *subject, r *record, p piece) (first *addition) {
	price, ok := b.price(s.ID, r, p)
	if !ok {
		return nil
	}
	for i, part := range rating.Split(p.span, p.quantity, nil) {
		k := accrualKey{s.ID, r.meter, price.ID, part.Hour}
		a, ok := b.added[k]
		if !ok {
			a = &addition{price: price, incarnation: r.store.incarnation, sequence: r.sequence}
			b.added[k] = a
		}
		a.quantity += part.Quantity
		if i == 0 {
			first = a
		}
	}
	return first
}

// price is the one that the record's lease froze. A record with a number that is no lease's is rated by the lease that ran.
func (b *batch) price(subjectID string, r *record, p piece) (rating.Price, bool) {
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
	if err := hastenRenewals(ctx, tx, b.suspended(), b.now); err != nil {
		return err
	}
	if err := saveCoverage(ctx, tx, b.stored, b.coverage); err != nil {
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

// settleClosed settles the nodes' closed members whose last record is now here.
func (b *batch) settleClosed(ctx context.Context, tx db.Tx, stores []store) error {
	waiting, err := unsettledSubjects(ctx, tx, nodesOf(stores))
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
