// Package rating turns measured quantities and prices into amounts of money. It is pure: integers in, integers out. It
// owns how a record is divided over hours and prices, how an amount is rounded, and how it is shared with the host. It
// does not know where accruals are kept or how entries are written (hub/internal/ledger).
//
// An amount is never computed from one record. Quantities add up exactly in an accrual, and what is posted is
// round(price × total) − posted so far: however usage was cut into records, and in whatever order they came, the sum of
// all postings of an accrual is the rounded price of its total.
package rating

import (
	"errors"
	"fmt"
	"math"
	"math/big"
	"slices"
	"time"
)

// ErrOverflow means that an amount or a quantity does not fit. Money is in nanos, billionths of the currency's main
// unit, so an amount ends at about nine billion units.
var ErrOverflow = errors.New("amount or quantity is out of range")

// BasisPoints in the whole: host shares are in ten-thousandths.
const BasisPoints = 10_000

// Price is one immutable row of the price book.
type Price struct {
	ID       string
	Meter    string
	Currency string
	// Nanos buy PerQuantity base units of the meter.
	Nanos       int64
	PerQuantity int64
	// HostBasisPoints of what is charged go to the host.
	HostBasisPoints int64
	// From and To bound the usage that this price is for, [From, To). Zero means no bound.
	From, To time.Time
}

// Part is the piece of a record that belongs to one UTC hour and one price.
type Part struct {
	From, To time.Time
	// Hour is the UTC hour that holds [From, To).
	Hour time.Time
	// PriceID is empty where no price applies.
	PriceID  string
	Quantity int64
}

// Accrual is all usage of one subject, meter, price and UTC hour so far, and what has been posted for it.
type Accrual struct {
	Quantity int64
	// ChargedNanos = round(price × Quantity) at the last posting: CollectedNanos + WrittenOffNanos.
	ChargedNanos    int64
	CollectedNanos  int64
	WrittenOffNanos int64
	// HostNanos is the host's part of CollectedNanos.
	HostNanos int64
}

// Delta is what one posting adds: what the tenant's hold pays, what the hold no longer covers, and the host's part of
// what was paid.
type Delta struct {
	CollectedNanos  int64
	WrittenOffNanos int64
	HostNanos       int64
}

// Zero says that there is nothing to post.
func (d Delta) Zero() bool { return d == Delta{} }

// Interval is a stretch of time [From, To).
type Interval struct{ From, To time.Time }

// Length is in microseconds, the finest time that usage is measured in.
func (i Interval) Length() int64 { return max(i.To.Sub(i.From).Microseconds(), 0) }

// Split divides a record over UTC hours and over the given prices, which must not overlap. Quantities follow the
// lengths of the pieces by largest remainder, so that they add up to the whole, and a quantity that is the length
// itself splits exactly. A record without length is one piece.
func Split(record Interval, quantity int64, prices []Price) []Part {
	if hour := record.From.UTC().Truncate(time.Hour); len(prices) == 0 && !record.To.After(hour.Add(time.Hour)) {
		// Nearly every record: nothing to divide.
		return []Part{{From: record.From, To: record.To, Hour: hour, Quantity: quantity}}
	}
	cuts := cutsOf(record, prices)
	intervals := make([]Interval, 0, len(cuts))
	for i := 1; i < len(cuts); i++ {
		intervals = append(intervals, Interval{cuts[i-1], cuts[i]})
	}
	if len(intervals) == 0 {
		intervals = []Interval{record}
	}
	quantities := Divide(quantity, intervals)
	parts := make([]Part, len(intervals))
	for i, iv := range intervals {
		parts[i] = Part{
			From: iv.From, To: iv.To, Hour: iv.From.UTC().Truncate(time.Hour), PriceID: priceAt(prices, iv.From),
			Quantity: quantities[i],
		}
	}
	return parts
}

// Divide spreads a quantity over intervals in proportion to their lengths, by largest remainder, earlier first among
// equals. The parts add up to the whole. Where all lengths are zero the first interval takes it.
func Divide(quantity int64, over []Interval) []int64 {
	out := make([]int64, len(over))
	switch len(over) {
	case 0:
		return out
	case 1:
		out[0] = quantity
		return out
	}
	var length int64
	for _, iv := range over {
		length += iv.Length()
	}
	if length == 0 {
		out[0] = quantity
		return out
	}
	type remainder struct {
		at   int
		rest *big.Int
	}
	left := quantity
	remainders := make([]remainder, len(over))
	for i, iv := range over {
		product := new(big.Int).Mul(big.NewInt(quantity), big.NewInt(iv.Length()))
		share, rest := product.QuoRem(product, big.NewInt(length), new(big.Int))
		out[i] = share.Int64()
		left -= out[i]
		remainders[i] = remainder{i, rest}
	}
	slices.SortStableFunc(remainders, func(a, b remainder) int { return b.rest.Cmp(a.rest) })
	for i := int64(0); i < left; i++ {
		out[remainders[i].at]++
	}
	return out
}

// Charge is round-half-even(price × quantity) in nanos.
func Charge(nanos, perQuantity, quantity int64) (int64, error) {
	if perQuantity <= 0 {
		return 0, fmt.Errorf("price is per %d units: %w", perQuantity, ErrOverflow)
	}
	return roundHalfEven(nanos, quantity, perQuantity)
}

// ChargeUp is Charge, rounded up: what a hold must cover.
func ChargeUp(nanos, perQuantity, quantity int64) (int64, error) {
	if perQuantity <= 0 {
		return 0, fmt.Errorf("price is per %d units: %w", perQuantity, ErrOverflow)
	}
	product := new(big.Int).Mul(big.NewInt(nanos), big.NewInt(quantity))
	product.Add(product, big.NewInt(perQuantity-1))
	product.Div(product, big.NewInt(perQuantity))
	return toInt64(product)
}

// Affords is the largest quantity whose ChargeUp stays within nanos; math.MaxInt64 where the price is zero.
func Affords(priceNanos, perQuantity, nanos int64) int64 {
	if priceNanos <= 0 {
		return math.MaxInt64
	}
	if nanos <= 0 {
		return 0
	}
	q := new(big.Int).Mul(big.NewInt(nanos), big.NewInt(perQuantity))
	q.Div(q, big.NewInt(priceNanos))
	if !q.IsInt64() {
		return math.MaxInt64
	}
	return q.Int64()
}

// Accrue adds a quantity to an accrual and says what to post for it. The tenant pays no more than available; the rest
// is written off, and the host has its share of what was paid.
func Accrue(a Accrual, p Price, quantity, available int64) (Accrual, Delta, error) {
	if quantity < 0 || available < 0 {
		return a, Delta{}, fmt.Errorf("accrue %d with %d available: %w", quantity, available, ErrOverflow)
	}
	if a.Quantity > math.MaxInt64-quantity {
		return a, Delta{}, ErrOverflow
	}
	next := a
	next.Quantity += quantity
	charged, err := Charge(p.Nanos, p.PerQuantity, next.Quantity)
	if err != nil {
		return a, Delta{}, err
	}
	owed := charged - a.ChargedNanos
	d := Delta{CollectedNanos: min(owed, available)}
	d.WrittenOffNanos = owed - d.CollectedNanos
	next.ChargedNanos = charged
	next.CollectedNanos += d.CollectedNanos
	next.WrittenOffNanos += d.WrittenOffNanos
	next.HostNanos, err = roundHalfEven(next.CollectedNanos, p.HostBasisPoints, BasisPoints)
	if err != nil {
		return a, Delta{}, err
	}
	d.HostNanos = next.HostNanos - a.HostNanos
	return next, d, nil
}

// cutsOf are the ends of the record and all hour and price boundaries inside it, in order.
func cutsOf(record Interval, prices []Price) []time.Time {
	if !record.To.After(record.From) {
		return nil
	}
	first := record.From.UTC().Truncate(time.Hour).Add(time.Hour)
	if len(prices) == 0 && !first.Before(record.To) {
		return []time.Time{record.From, record.To}
	}
	cuts := []time.Time{record.From}
	for h := first; h.Before(record.To); h = h.Add(time.Hour) {
		cuts = append(cuts, h)
	}
	for _, p := range prices {
		for _, edge := range []time.Time{p.From, p.To} {
			if edge.After(record.From) && edge.Before(record.To) {
				cuts = append(cuts, edge)
			}
		}
	}
	cuts = append(cuts, record.To)
	slices.SortFunc(cuts, time.Time.Compare)
	return slices.CompactFunc(cuts, time.Time.Equal)
}

func priceAt(prices []Price, at time.Time) string {
	for _, p := range prices {
		if !at.Before(p.From) && (p.To.IsZero() || at.Before(p.To)) {
			return p.ID
		}
	}
	return ""
}

// roundHalfEven is a×b/by for non-negative a, b and positive by.
func roundHalfEven(a, b, by int64) (int64, error) {
	product := new(big.Int).Mul(big.NewInt(a), big.NewInt(b))
	q, rest := product.QuoRem(product, big.NewInt(by), new(big.Int))
	rest.Lsh(rest, 1)
	if c := rest.Cmp(big.NewInt(by)); c > 0 || c == 0 && q.Bit(0) == 1 {
		q.Add(q, big.NewInt(1))
	}
	return toInt64(q)
}

func toInt64(v *big.Int) (int64, error) {
	if !v.IsInt64() {
		return 0, ErrOverflow
	}
	return v.Int64(), nil
}
