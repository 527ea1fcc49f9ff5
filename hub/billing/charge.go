package billing

import (
	"cmp"
	"errors"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/gpuaas/hub/rating"
)

// maxRecordsPerHour bounds the records of a member and meter that begin in one hour: one a second, where a node makes
// one in thirty.
const maxRecordsPerHour = 3600

// maxSuspended bounds a sum, so that two totals of two sums each can be added.
const maxSuspended = math.MaxInt64 / 4

// Batch is what charging records changes in a book. Charge makes it.
type Batch struct {
	// Accepted are the records of which something is billed, Suspended the parts that are not.
	Accepted  []Accepted
	Suspended []Suspended
	// Charges are what was added to the hours, in the order in which holds pay them.
	Charges []Charge
	// Drawn are the members whose hold pays something; their new holds are in the book.
	Drawn map[string]bool
	// Finals name the last records of members.
	Finals map[string]Final

	book  *Book
	now   time.Time
	added map[AccrualKey]*Addition
	// counted is what is accepted of the hours, with what is stored of them.
	counted map[hourKey]*hourCount
}

// Addition is what a batch adds to an accrual: a quantity, and the records that began in its hour.
type Addition struct {
	Quantity, Records int64
	// Price is empty where the usage has none.
	Price rating.Price
}

// Accepted is a record with what of it is billed.
type Accepted struct {
	*Record
	Quantity int64
	// Pieces are all parts of the record.
	Pieces []Piece
	// First is what the record was first added to.
	First *Addition
}

// Suspended is a part of a record that is not billed.
type Suspended struct {
	*Record
	Piece Piece
}

// Charge is what an addition costs.
type Charge struct {
	Key AccrualKey
	*Addition
	Delta rating.Delta
}

// Charge bills records to the members of the book and changes it accordingly. Prepare comes first. Nothing that a
// record says makes it fail: what cannot be billed is suspended with a reason.
func (b *Book) Charge(now time.Time, records []*Record) (*Batch, error) {
	out := &Batch{
		book: b, now: now, Drawn: map[string]bool{}, Finals: map[string]Final{}, added: map[AccrualKey]*Addition{},
		counted: map[hourKey]*hourCount{}, Accepted: make([]Accepted, 0, len(records)),
	}
	for _, r := range records {
		out.add(r)
	}
	return out, out.rate()
}

// add divides one record into what is billed and what is suspended.
func (b *Batch) add(r *Record) {
	m, reason := b.book.memberOf(r)
	if reason != "" {
		b.suspend(r, Piece{r.Span, r.Quantity, reason})
		return
	}
	if r.Final {
		b.Finals[m.ID] = Final{r.Store.Incarnation, r.Sequence}
	}
	if r.Quantity == 0 && r.Span.Length() == 0 && !r.Span.From.IsZero() {
		return // it only marks the end, without usage
	}
	pieces := clip(r, m, bounds{b.now, m.Claim(), b.book.Leases[m.ID].covered, r.billed})
	b.put(m, r, b.withinHour(m, r, pieces))
}

// withinHour bounds what is accepted of a member and meter in one hour, however many runs its node names.
func (b *Batch) withinHour(m *Member, r *Record, pieces []Piece) []Piece {
	hour, ok := firstHour(pieces)
	if !ok {
		return pieces
	}
	k := hourKey{r.MemberID, r.Meter, hour}
	count := b.counted[k]
	if count == nil {
		count = b.book.count(k)
		b.counted[k] = count
	}
	if count.records >= maxRecordsPerHour {
		return []Piece{{r.Span, r.Quantity, SuspenseTooFragmented}}
	}
	count.records++
	most := maxPerHour(r, m)
	for i := range pieces {
		p := &pieces[i]
		if p.Reason != "" {
			continue
		}
		if left := max(most-count.quantity, 0); p.Quantity > left {
			pieces = append(pieces, Piece{p.Span, p.Quantity - left, SuspenseBeyondLimit})
			p = &pieces[i]
			p.Quantity = left
		}
		count.quantity += p.Quantity
	}
	return pieces
}

// firstHour is the hour in which what is accepted begins; ok is false where nothing is.
func firstHour(pieces []Piece) (hour time.Time, ok bool) {
	for _, p := range pieces {
		if p.Reason == "" {
			return HourOf(p.Span.From), true
		}
	}
	return hour, false
}

// put suspends the pieces of a record that have a reason, and bills the others.
func (b *Batch) put(m *Member, r *Record, pieces []Piece) {
	row := Accepted{Record: r, Pieces: pieces}
	for _, p := range pieces {
		if p.Reason != "" {
			if p.Quantity != 0 {
				b.suspend(r, p)
			}
			continue
		}
		row.Quantity += p.Quantity
		a := b.accrue(m, r, p)
		if row.First == nil && a != nil {
			row.First = a
			a.Records++
		}
		if r.billed.Before(p.Span.From) {
			r.billed.outOfOrder++
		}
		r.billed.Add(p.Span)
	}
	if row.First != nil {
		b.Accepted = append(b.Accepted, row)
	}
}

func (b *Batch) suspend(r *Record, p Piece) { b.Suspended = append(b.Suspended, Suspended{r, p}) }

// accrue adds an accepted piece to its hours, at the prices that its leases froze; it returns the first addition. Usage
// without a price adds up and is not charged.
func (b *Batch) accrue(m *Member, r *Record, p Piece) (first *Addition) {
	leases := b.book.Leases[m.ID]
	if no, ok := leases.windows.Whole(p.Span, r.LeaseNo); ok {
		return b.accrueAt(leases, r, p.Span, p.Quantity, no)
	}
	for _, by := range leases.windows.Divide(p.Span, p.Quantity, r.LeaseNo) {
		if a := b.accrueAt(leases, r, by.Interval, by.Quantity, by.LeaseNo); first == nil {
			first = a
		}
	}
	return first
}

func (b *Batch) accrueAt(leases Leases, r *Record, span rating.Interval, quantity, leaseNo int64) (first *Addition) {
	price, _ := leases.price(leaseNo, r.Meter)
	for _, part := range rating.Split(span, quantity, nil) {
		k := AccrualKey{r.MemberID, r.Meter, price.ID, part.Hour}
		a, ok := b.added[k]
		if !ok {
			a = &Addition{Price: price}
			b.added[k] = a
		}
		a.Quantity += part.Quantity
		if first == nil {
			first = a
		}
	}
	return first
}

// rate charges what was added to the hours, in a fixed order: where a hold runs out, the earliest hour is paid first.
func (b *Batch) rate() error {
	b.Charges = make([]Charge, 0, len(b.added))
	for k, a := range b.added {
		b.Charges = append(b.Charges, Charge{Key: k, Addition: a})
	}
	slices.SortFunc(b.Charges, func(x, y Charge) int { return x.Key.Compare(y.Key) })
	rated := b.Charges[:0]
	for _, c := range b.Charges {
		h, m := b.book.Holds[c.Key.MemberID], b.book.Members[c.Key.MemberID]
		hour := b.book.Hour(c.Key)
		next, d, err := Rate(hour.Accrual, *c.Addition, h.Balance())
		if errors.Is(err, rating.ErrOverflow) {
			span := rating.Interval{From: c.Key.Hour, To: c.Key.Hour.Add(time.Hour)}
			b.suspend(&Record{Store: Store{NodeID: m.NodeID}, MemberID: m.ID, Meter: c.Key.Meter, Span: span},
				Piece{span, c.Quantity, SuspenseOutOfRange})
			continue
		}
		if err != nil {
			return err
		}
		if d.CollectedNanos > 0 {
			h.Posted += d.CollectedNanos
			b.book.Holds[m.ID], b.Drawn[m.ID] = h, true
		}
		hour.Accrual, hour.Records = next, hour.Records+c.Records
		c.Delta = d
		rated = append(rated, c)
	}
	b.Charges = rated
	return nil
}

// Rate adds to an accrual, of which the hold pays what is available; what has no price costs nothing.
func Rate(to rating.Accrual, a Addition, available int64) (rating.Accrual, rating.Delta, error) {
	if a.Price.ID != "" {
		return rating.Accrue(to, a.Price, a.Quantity, available)
	}
	if to.Quantity > math.MaxInt64-a.Quantity {
		return to, rating.Delta{}, rating.ErrOverflow
	}
	to.Quantity += a.Quantity
	return to, rating.Delta{}, nil
}

// SuspendedKey is usage of one member and meter that its own node measured and that is not billed.
type SuspendedKey struct{ MemberID, Meter string }

// Compare orders keys.
func (k SuspendedKey) Compare(o SuspendedKey) int {
	return cmp.Or(strings.Compare(k.MemberID, o.MemberID), strings.Compare(k.Meter, o.Meter))
}

// SuspendedSum is what a batch adds to suspense, of one member and meter.
type SuspendedSum struct {
	Quantity int64
	// Since is the most that the node can have measured from OpenedAt until now. Before is the same of the time before
	// OpenedAt from which the batch has usage: a restored hub may have forgotten when it opened a member.
	Since, Before int64
}

// SuspendedTotal is what is in suspense of one member and meter, over all batches.
type SuspendedTotal struct {
	Quantity int64
	// Before is the largest Before of a batch: of segments that tell of the time before OpenedAt one after the other,
	// each counts.
	Before int64
}

// Add returns the total with a batch's addition: no more than the node can have measured. It never falls.
func (t SuspendedTotal) Add(s SuspendedSum) SuspendedTotal {
	t.Before = max(t.Before, s.Before)
	t.Quantity = max(t.Quantity, min(t.Quantity+s.Quantity, s.Since+t.Before))
	return t
}

// SuspendedTotals sums what the batch adds to suspense, for the members whose lease it counts against: the node has
// counted it there. Usage that was billed before, and what another node reports, is not part of it.
func (b *Batch) SuspendedTotals() map[SuspendedKey]SuspendedSum {
	sums := map[SuspendedKey]SuspendedSum{}
	for _, row := range b.Suspended {
		m, reason := b.book.memberOf(row.Record)
		if reason != "" || row.Piece.Reason == SuspenseAlreadyBilled || row.Piece.Quantity <= 0 {
			continue
		}
		k := SuspendedKey{m.ID, row.Meter}
		s, from := sums[k], latest(row.Piece.Span.From, m.OpenedAt.Add(-StaleAfter))
		s.Since = m.measurable(row.Meter, b.now.Add(maxClockSkew).Sub(m.OpenedAt))
		s.Before = max(s.Before, m.measurable(row.Meter, m.OpenedAt.Sub(from)))
		s.Quantity = min(s.Quantity+min(row.Piece.Quantity, maxSuspended), s.Since+s.Before)
		sums[k] = s
	}
	return sums
}

// measurable is the most of a meter that the member's node can measure in so long.
func (m *Member) measurable(meter string, in time.Duration) int64 {
	most, ok := m.MaxUse(meter, max(in.Microseconds(), 0))
	if !ok {
		return maxSuspended
	}
	return min(most, maxSuspended)
}
