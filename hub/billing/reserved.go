package billing

import (
	"math"
	"math/big"
	"time"

	"github.com/gpuaas/gpuaas/hub/rating"
)

const (
	// ReservedAhead is how far ahead of its bill a hold of what is reserved reaches, where the wallet has so much.
	ReservedAhead = time.Hour
	// ReservedNotice is how much paid time is left at most of what is reserved when it is called exhausted.
	ReservedNotice = 10 * time.Minute
)

// Reserved is what is billed by the hub's own clock, used or not: an allocation, a volume or an attachment.
type Reserved struct {
	ID    string
	Meter string
	// OfBytes says that its quantity is Bytes times seconds, and not time in microseconds.
	OfBytes bool
	Bytes   int64
	// Prices is the schedule of its meter.
	Prices []rating.Price
	// Until is up to when it is billed.
	Until time.Time
	Hold  Hold
}

// Quantity is that of a stretch of time; less than one unit is not billed. It returns rating.ErrOverflow where the
// quantity is too large.
func (r Reserved) Quantity(span rating.Interval) (int64, error) {
	if !r.OfBytes {
		return span.Length(), nil
	}
	product := new(big.Int).Mul(big.NewInt(r.Bytes), big.NewInt(span.Length()))
	product.Div(product, big.NewInt(time.Second.Microseconds()))
	if !product.IsInt64() {
		return 0, rating.ErrOverflow
	}
	return product.Int64(), nil
}

// Lacks is what the hold lacks to pay for the time from Until to a moment, which is billed next, and for so much time
// ahead of it. Both are rounded up, as the bill rounds the first and Exhausted the second.
func (r Reserved) Lacks(to time.Time, ahead time.Duration) (int64, error) {
	cost, err := r.cost(rating.Interval{From: r.Until, To: to}, rating.Interval{From: to, To: to.Add(ahead)})
	return max(cost-r.Hold.Balance(), 0), err
}

// Exhausted reports whether the hold pays for less than ReservedNotice from a moment on.
func (r Reserved) Exhausted(now time.Time) (bool, error) {
	cost, err := r.cost(rating.Interval{From: now, To: now.Add(ReservedNotice)})
	return r.Hold.Balance() < cost, err
}

// cost is what stretches of time cost at most.
func (r Reserved) cost(spans ...rating.Interval) (sum int64, err error) {
	for _, span := range spans {
		parts, err := r.split(span)
		if err != nil {
			return 0, err
		}
		for _, part := range parts {
			p := r.price(part.PriceID)
			if p.ID == "" {
				continue
			}
			cost, err := rating.ChargeUp(p.Nanos, p.PerQuantity, part.Quantity)
			if err != nil {
				return 0, err
			}
			if sum > math.MaxInt64-cost {
				return 0, rating.ErrOverflow
			}
			sum += cost
		}
	}
	return sum, nil
}

// split divides a stretch of time over UTC hours and prices. Each hour has a quantity of its own: that of weeks, in
// which the hub was away, may be out of range.
func (r Reserved) split(span rating.Interval) (parts []rating.Part, err error) {
	for hour := HourOf(span.From); hour.Before(span.To); hour = hour.Add(time.Hour) {
		own := rating.Interval{From: latest(span.From, hour), To: earliest(span.To, hour.Add(time.Hour))}
		quantity, err := r.Quantity(own)
		if err != nil {
			return nil, err
		}
		parts = append(parts, rating.Split(own, quantity, r.Prices)...)
	}
	return parts, nil
}

// price is that with an id; the zero price where there is none.
func (r Reserved) price(id string) rating.Price {
	for _, p := range r.Prices {
		if p.ID == id {
			return p
		}
	}
	return rating.Price{}
}

// Accrue adds the time from Until to a moment to the hours of the book, which changes, and draws its cost on the hold.
// What the hold does not cover is written off. The charges are in the order of time; Records marks those that begin a
// record, which is one but where its quantity would be out of range.
func (r Reserved) Accrue(book *Book, to time.Time) (Reserved, []Charge, error) {
	parts, err := r.split(rating.Interval{From: r.Until, To: to})
	if err != nil || len(parts) == 0 {
		return r, nil, err
	}
	var charges []Charge
	var record int64
	for n, part := range parts {
		key := AccrualKey{MemberID: r.ID, Meter: r.Meter, PriceID: part.PriceID, Hour: part.Hour}
		a := &Addition{Quantity: part.Quantity, Price: r.price(part.PriceID)}
		// An hour of all that a node can keep is less than half of what a record holds.
		if n == 0 || !part.Hour.Equal(parts[n-1].Hour) && record > math.MaxInt64/2 {
			a.Records, record = 1, 0
		}
		record += part.Quantity
		h := book.Hour(key)
		next, delta, err := Rate(h.Accrual, *a, r.Hold.Balance())
		if err != nil {
			return r, nil, err
		}
		h.Accrual = next
		h.Records += a.Records
		r.Hold.Posted += delta.CollectedNanos
		charges = append(charges, Charge{key, a, delta})
	}
	r.Until = to
	return r, charges, nil
}
