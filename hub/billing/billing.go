// Package billing decides what a member of an app instance is billed: the length and cap of its leases, which part of a
// usage record is charged and which goes to suspense, what an hour costs, and when the bill is final. It is pure: it
// takes what the ledger has stored as plain values and returns what to store. It does not read or write the database
// (hub/internal/ledger) and does not round amounts (hub/rating).
package billing

import (
	"math"
	"time"

	"github.com/gpuaas/gpuaas/hub/rating"
	"github.com/gpuaas/gpuaas/protocol"
)

// maxClockSkew is how far a node's clock may be ahead of the hub's before its time counts as not elapsed yet. The same
// stretch arrives only once, so the allowance is not gained with each record.
const maxClockSkew = 2 * time.Minute

// maxCloseAhead is how far ahead of the hub's the clock may be that names the end of a claim.
const maxCloseAhead = 10 * time.Minute

// StaleAfter is how long after its last lease a closed member's hold waits for the node's final record. Then the node
// is taken for gone, and usage that still arrives is written off.
const StaleAfter = 30 * 24 * time.Hour

// Member is what bounds the bill of a member.
type Member struct {
	ID     string
	NodeID string
	// CPUMillis and MemoryBytes are its limits; zero means unknown.
	CPUMillis   int64
	MemoryBytes int64
	// Accelerators are those it has to itself; a member without any is charged for none.
	Accelerators int64
	OpenedAt     time.Time
	// ClosedAt is the end of its claim; zero while it is open.
	ClosedAt time.Time
	// Idle is when its node last reported that nothing of it runs, from the first such report to the last.
	Idle rating.Interval
}

// Claim is when the member may be billed.
func (m Member) Claim() rating.Interval { return rating.Span(m.OpenedAt, m.ClosedAt) }

// CloseAt is the end of a claim that is asked to end at a moment. A clock that was never set names a time before the
// claim began, one that runs ahead a time to come: then the claim ends now, or later usage would lie outside it.
func CloseAt(openedAt, at, now time.Time) time.Time {
	at = at.UTC().Truncate(time.Microsecond)
	if at.Before(openedAt) || at.After(now.Add(maxCloseAhead)) {
		at = now.UTC().Truncate(time.Microsecond)
	}
	return latest(openedAt, at)
}

// Final names the record after which nothing of a member follows.
type Final struct {
	Incarnation string
	Sequence    int64
}

// Posted reports whether the final record is posted, with all before it. postedTo is the last record number up to which
// the store of the final record is posted without a gap.
func (f Final) Posted(postedTo int64) bool { return f.Incarnation != "" && postedTo >= f.Sequence }

// Stale reports whether the hold of a closed member waits no longer for the node's final record.
func Stale(closedAt, leasedUntil, now time.Time) bool {
	before := now.Add(-StaleAfter)
	return closedAt.Before(before) && leasedUntil.Before(before)
}

// MaxUse is the largest quantity of a meter that the member can use in so many microseconds. It is zero where its limit
// is unknown; ok is false where the quantity is out of range.
func (m Member) MaxUse(meter string, micros int64) (quantity int64, ok bool) {
	switch meter {
	case protocol.MeterSessionSeconds:
		return micros, true
	case protocol.MeterAcceleratorSeconds:
		q, err := rating.ChargeUp(m.Accelerators, 1, micros)
		return q, err == nil
	case protocol.MeterCPUSeconds:
		q, err := rating.ChargeUp(m.CPUMillis, 1000, micros)
		return q, err == nil
	case protocol.MeterMemoryByteSeconds:
		q, err := rating.ChargeUp(m.MemoryBytes, 1_000_000, micros)
		return q, err == nil
	default:
		return 0, true
	}
}

// MaxCost is the most that so many microseconds of running can cost; ok is false when it is out of range.
func (m Member) MaxCost(prices []FrozenPrice, micros int64) (nanos int64, ok bool) {
	for _, p := range prices {
		limit, ok := m.MaxUse(p.Meter, micros)
		if !ok {
			return 0, false
		}
		cost, err := rating.ChargeUp(p.Nanos, p.PerQuantity, limit)
		if err != nil || nanos > math.MaxInt64-cost {
			return 0, false
		}
		nanos += cost
	}
	return nanos, true
}

func latest(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

func earliest(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}
