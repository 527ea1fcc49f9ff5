package billing

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/gpuaas/hub/rating"
)

// Book is what is stored of members before usage is charged to them. A key without a value is one of which nothing is
// stored.
type Book struct {
	Members map[string]*Member
	Leases  map[string]Leases
	Holds   map[string]Hold
	// Billed is the time that is billed. Prepare adds the keys of the records.
	Billed map[TimeKey]*BilledTime
	// Hours are the members' accruals.
	Hours map[string]Hours
}

// NewBook returns an empty book.
func NewBook() *Book {
	return &Book{
		Members: map[string]*Member{}, Leases: map[string]Leases{}, Holds: map[string]Hold{},
		Billed: map[TimeKey]*BilledTime{}, Hours: map[string]Hours{},
	}
}

// AccrualKey is where quantities add up. PriceID is empty for usage that has no price.
type AccrualKey struct {
	MemberID string
	Meter    string
	PriceID  string
	Hour     time.Time
}

// Compare orders keys so that where a hold runs out, the earliest hour is paid first.
func (k AccrualKey) Compare(o AccrualKey) int {
	return cmp.Or(strings.Compare(k.MemberID, o.MemberID), k.Hour.Compare(o.Hour), strings.Compare(k.Meter, o.Meter),
		strings.Compare(k.PriceID, o.PriceID))
}

// Hour is what is stored of a member, meter and price in one UTC hour.
type Hour struct {
	AccrualKey
	rating.Accrual
	// Records are those that began in the hour.
	Records int64
}

// Hours are the accruals of one member, ordered by AccrualKey.Compare.
type Hours []Hour

// Find returns where the accrual of a key is, or belongs. Usage is recent: mostly that is at the end.
func (h Hours) Find(k AccrualKey) (at int, found bool) {
	if n := len(h); n == 0 || h[n-1].Compare(k) < 0 {
		return n, false
	}
	return slices.BinarySearchFunc(h, k, func(h Hour, k AccrualKey) int { return h.Compare(k) })
}

// Hour returns the accrual of a key, to be read or changed; an unknown one is added. It is valid until the next call.
func (b *Book) Hour(k AccrualKey) *Hour {
	h := b.Hours[k.MemberID]
	at, found := h.Find(k)
	if !found {
		h = slices.Insert(h, at, Hour{AccrualKey: k})
		b.Hours[k.MemberID] = h
	}
	return &h[at]
}

// hourKey is a member and meter in a UTC hour.
type hourKey struct {
	memberID, meter string
	hour            time.Time
}

// hourCount is how many records began in an hour, and their quantity, over all runs and prices.
type hourCount struct{ records, quantity int64 }

// count sums up what is stored of a member and meter in an hour.
func (b *Book) count(k hourKey) *hourCount {
	c, h := &hourCount{}, b.Hours[k.memberID]
	for at, _ := h.Find(AccrualKey{MemberID: k.memberID, Hour: k.hour, Meter: k.meter}); at < len(h); at++ {
		if h[at].Meter != k.meter || !h[at].Hour.Equal(k.hour) {
			break
		}
		c.records += h[at].Records
		c.quantity += h[at].Quantity
	}
	return c
}

// HourOf is the UTC hour of a moment.
func HourOf(t time.Time) time.Time { return t.UTC().Truncate(time.Hour) }

const (
	// MaxSpans bounds the intervals of billed time of one key that are read. An honest node's begin where its records
	// do.
	MaxSpans = 10_000
	// maxOutOfOrder bounds how often a batch adds to one key before what is billed already. A node seals its records in
	// order.
	maxOutOfOrder = 1000
)

// BilledTime is what is billed of one key.
type BilledTime struct {
	// Since is the earliest beginning of the key's records: what is billed before it need not be loaded.
	Since time.Time
	*rating.Coverage
	// outOfOrder counts what the batch adds before what is billed already.
	outOfOrder int
}

// fragmented reports whether a record is one too many of what no honest meter makes: each would cost all nodes' batches
// time.
func (t *BilledTime) fragmented() bool {
	return t != nil && (len(t.Spans()) >= MaxSpans || t.outOfOrder >= maxOutOfOrder)
}

// Leases are a member's leases. NewLeases makes it.
type Leases struct {
	// all are ordered by number; windows are theirs, and covered are the windows joined.
	all     []Lease
	windows rating.Leases
	covered []rating.Interval
}

// NewLeases takes leases ordered by number, which it owns from then on.
func NewLeases(ordered []Lease) Leases {
	windows, spans := make([]rating.Window, len(ordered)), make([]rating.Interval, len(ordered))
	for i, l := range ordered {
		windows[i], spans[i] = rating.Window{LeaseNo: l.No, Interval: l.Window()}, l.Window()
	}
	return Leases{all: ordered, windows: rating.NewLeases(windows), covered: rating.Union(spans)}
}

// All are the leases, ordered by number.
func (l Leases) All() []Lease { return l.all }

// Newest is the lease with the highest number; the zero lease where there is none.
func (l Leases) Newest() Lease {
	if len(l.all) == 0 {
		return Lease{}
	}
	return l.all[len(l.all)-1]
}

// price is the one that a lease froze for a meter.
func (l Leases) price(leaseNo int64, meter string) (rating.Price, bool) {
	at, found := slices.BinarySearchFunc(l.all, leaseNo, func(l Lease, no int64) int { return cmp.Compare(l.No, no) })
	if !found {
		return rating.Price{}, false
	}
	for _, p := range l.all[at].Prices {
		if p.Meter == meter {
			return p.Price(l.all[at].Currency), true
		}
	}
	return rating.Price{}, false
}

// Reach is how far back the records of a member go.
type Reach struct {
	MemberID string
	Span     rating.Interval
}

// Prepare links each record to the billed time of its key and returns the members that may be billed, ordered by id,
// each with the time of its records. The ledger loads that much of them, and of each key in Billed what is billed from
// Since on. Anybody's record may name any member and any time; those that cannot be billed are not linked.
func (b *Book) Prepare(records []*Record) []Reach {
	members := map[string]rating.Interval{}
	for _, r := range records {
		r.billed = nil // of an earlier attempt of the transaction
		m, reason := b.memberOf(r)
		if reason != "" || r.malformed() != "" {
			continue
		}
		if claim := m.Claim(); !r.Span.To.After(claim.From) || !r.Span.From.Before(claim.To) {
			continue
		}
		from := latest(r.Span.From, m.OpenedAt)
		span, known := members[m.ID]
		if !known || from.Before(span.From) {
			span.From = from
		}
		span.To = latest(span.To, r.Span.To)
		members[m.ID] = span
		r.billed = b.billedTime(r.key(), from)
	}
	out := make([]Reach, 0, len(members))
	for id, span := range members {
		out = append(out, Reach{id, span})
	}
	slices.SortFunc(out, func(a, b Reach) int { return strings.Compare(a.MemberID, b.MemberID) })
	return out
}

func (b *Book) billedTime(key TimeKey, from time.Time) *BilledTime {
	t := b.Billed[key]
	if t == nil {
		t = &BilledTime{Since: from, Coverage: rating.NewCoverage(nil)}
		b.Billed[key] = t
	}
	t.outOfOrder = 0
	t.Since = earliest(t.Since, from)
	return t
}

// memberOf is the member that a record is for, or why its node may not bill it.
func (b *Book) memberOf(r *Record) (m *Member, reason string) {
	m, known := b.Members[r.MemberID]
	switch {
	case !known:
		return nil, SuspenseUnknownSubject
	case m.NodeID != r.Store.NodeID:
		return nil, SuspenseWrongNode
	}
	return m, ""
}
