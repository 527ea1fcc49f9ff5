package billing

import (
	"math"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/rating"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// MinLease is the shortest lease that is worth its messages; a wallet that affords less gets none.
	MinLease = 15 * time.Minute
	// MaxLease bounds how long a node may spend without asking again.
	MaxLease = 7 * 24 * time.Hour
	// HoldMargin is held beyond a lease's end: what the last metering intervals and a slow stop may take.
	HoldMargin = 10 * time.Minute

	endPolicyStop = "stop"
)

// FrozenPrice is a price as a lease keeps it.
type FrozenPrice struct {
	Meter           string `json:"meter"`
	PriceID         string `json:"price_id"`
	Nanos           int64  `json:"nanos"`
	PerQuantity     int64  `json:"per_quantity"`
	HostBasisPoints int64  `json:"host_basis_points"`
}

// Price is the frozen price in the currency of its lease.
func (p FrozenPrice) Price(currency string) rating.Price {
	return rating.Price{
		ID: p.PriceID, Meter: p.Meter, Currency: currency, Nanos: p.Nanos, PerQuantity: p.PerQuantity,
		HostBasisPoints: p.HostBasisPoints,
	}
}

// Lease permits a member to run until ExpiresAt and to spend CapNanos in all.
type Lease struct {
	MemberID  string
	No        int64
	NodeID    string
	HoldID    string
	Currency  string
	CapNanos  int64
	IssuedAt  time.Time
	ExpiresAt time.Time
	// CoveredSince is since when leases of the member have covered time without a gap.
	CoveredSince time.Time
	EndPolicy    string
	Prices       []FrozenPrice
}

// Window is the time that the lease covers.
func (l Lease) Window() rating.Interval { return rating.Interval{From: l.IssuedAt, To: l.ExpiresAt} }

// RenewAt is when the next lease is due.
func (l Lease) RenewAt() time.Time {
	return l.IssuedAt.Add(rating.RenewAfter(l.MemberID, uint64(l.No), l.ExpiresAt.Sub(l.IssuedAt)))
}

// Message is the lease as its node gets it.
func (l Lease) Message() *protocol.Lease {
	out := &protocol.Lease{
		MemberId: l.MemberID, LeaseNo: uint64(l.No), HoldId: l.HoldID, CapNanos: l.CapNanos, Currency: l.Currency,
		EndPolicy: l.EndPolicy, ExpiresAt: timestamppb.New(l.ExpiresAt),
		DurationSeconds: uint64(l.ExpiresAt.Sub(l.IssuedAt) / time.Second), CoveredSince: timestamppb.New(l.CoveredSince),
	}
	for _, p := range l.Prices {
		out.Prices = append(out.Prices, &protocol.FrozenPrice{
			Meter: p.Meter, PriceId: p.PriceID, PriceNanos: p.Nanos, PerQuantity: p.PerQuantity,
		})
	}
	return out
}

// Hold keeps money of a wallet for one subject.
type Hold struct{ Placed, Posted, Released int64 }

// Balance is what is left in the hold.
func (h Hold) Balance() int64 { return h.Placed - h.Posted - h.Released }

// Past is what a member's next lease depends on. The zero value is a member that was opened just now.
type Past struct {
	Hold Hold
	// LastLease is the number of the newest lease, CoveredSince is the newest lease's.
	LastLease    int64
	CoveredSince time.Time
	// UnreportedMicros is the leased time for which usage may still arrive; LeasedUntil is when the newest lease ends.
	UnreportedMicros int64
	LeasedUntil      time.Time
	// Left is what of each lease may still be reported, or used before its node has the next one.
	Left []LeaseLeft
	// SuspendedNanos is what usage in suspense would cost.
	SuspendedNanos int64
}

// LeaseLeft is so much time at the prices of a lease.
type LeaseLeft struct {
	Prices []FrozenPrice
	Micros int64
}

// Wish is what the next lease is asked for: at most Duration, at these prices, paid by a wallet with WalletNanos.
type Wish struct {
	Now         time.Time
	Duration    time.Duration
	Currency    string
	Prices      []FrozenPrice
	WalletNanos int64
}

// NextLease returns a member's next lease and what its hold lacks for it. The lease is as long as the wallet affords,
// at most MaxLease. ok is false where that is less than MinLease, or ends no later than the lease that runs.
func NextLease(m Member, p Past, w Wish) (l Lease, lacks int64, ok bool) {
	wish := min(max(w.Duration, MinLease), MaxLease).Truncate(time.Second)
	dearer := p.dearer(m, w.Prices)
	cost := func(micros int64) (int64, bool) {
		nanos, ok := m.MaxCost(w.Prices, micros)
		return nanos + dearer, ok && nanos <= math.MaxInt64-dearer
	}
	duration, lacks := rating.Affordable(cost, p.Hold.Balance(), w.WalletNanos, p.UnreportedMicros, wish, HoldMargin)
	l = Lease{
		MemberID: m.ID, No: p.LastLease + 1, NodeID: m.NodeID, Currency: w.Currency, IssuedAt: w.Now,
		ExpiresAt: w.Now.Add(duration), EndPolicy: endPolicyStop, Prices: w.Prices,
		CapNanos:     rating.Cap(p.Hold.Placed+lacks-p.Hold.Released, p.SuspendedNanos),
		CoveredSince: w.Now,
	}
	if !p.LeasedUntil.Before(w.Now) && !p.CoveredSince.IsZero() {
		l.CoveredSince = p.CoveredSince
	}
	if duration < MinLease || duration < wish && !l.ExpiresAt.After(p.LeasedUntil) {
		return Lease{}, 0, false
	}
	return l, lacks, true
}

// SetUnreported sets what the node may still report or use under leases: those that end after since, up to which
// running time is billed. No usage is expected of the time for which the node reports that nothing of the member runs.
func (p *Past) SetUnreported(m Member, since, now time.Time, leases []Lease) {
	running := rating.Subtract(rating.Interval{From: since, To: now}, []rating.Interval{m.Idle})
	within := func(leased []rating.Interval) (micros int64) {
		for _, r := range running {
			micros += rating.TotalLength(rating.Intersect(r, leased))
		}
		return micros
	}
	windows := make([]rating.Interval, len(leases))
	for n, l := range leases {
		windows[n] = l.Window()
		p.LeasedUntil = latest(p.LeasedUntil, l.ExpiresAt)
		left := within(windows[n:n+1]) + rating.Interval{From: now, To: l.ExpiresAt}.Length()
		p.Left = append(p.Left, LeaseLeft{l.Prices, left})
	}
	p.UnreportedMicros = within(rating.Union(windows))
}

// dearer is what the leases may still cost beyond what the same time costs at these prices: they may have frozen higher
// ones. It is math.MaxInt64 where it is out of range.
func (p Past) dearer(m Member, prices []FrozenPrice) (nanos int64) {
	for _, l := range p.Left {
		own, ok := m.MaxCost(l.Prices, l.Micros)
		now, _ := m.MaxCost(prices, l.Micros)
		more := max(own-now, 0)
		if !ok || nanos > math.MaxInt64-more {
			return math.MaxInt64
		}
		nanos += more
	}
	return nanos
}

// SuspendedCost is what usage in suspense would cost: the node counts it against the cap. Usage that was billed before
// under another name is not part of it: the node has counted that once.
func SuspendedCost(prices []FrozenPrice, quantities map[string]int64) int64 {
	var sum int64
	for _, p := range prices {
		cost, err := rating.ChargeUp(p.Nanos, p.PerQuantity, quantities[p.Meter])
		if err != nil {
			return 0 // a quantity that no node can have measured earns no cap
		}
		sum = rating.Cap(sum, cost)
	}
	return sum
}

// DueNow reports whether the next lease is due at once: the running time that went into suspense since the newest lease
// uses up that lease, because the node has counted it.
func DueNow(suspendedMicros, suspendedAtLease int64) bool {
	return suspendedMicros-suspendedAtLease > HoldMargin.Microseconds()
}

const (
	// firstRetry is the pause after a first failure; it doubles with each further one, up to LastRetry.
	firstRetry = time.Minute
	// LastRetry is the longest pause.
	LastRetry = time.Hour
)

// RetryAfter is the pause after so many failures in a row.
func RetryAfter(failures int64) time.Duration { return retryAfter(failures, LastRetry) }

func retryAfter(failures int64, longest time.Duration) time.Duration {
	return min(firstRetry<<min(max(failures, 1)-1, 10), longest)
}

// RetryRenewal is the pause after so many renewals in a row that the wallet did not cover. While the newest lease runs
// it is worth asking often; a grant of credit makes the member due at once.
func RetryRenewal(failures int64, leasedUntil, now time.Time) time.Duration {
	if leasedUntil.After(now) {
		return retryAfter(failures, HoldMargin)
	}
	return RetryAfter(failures)
}

// Surplus is what the hold of a member that does not run has beyond the usage that may still arrive.
func Surplus(m Member, p Past, prices []FrozenPrice) int64 {
	need, ok := m.MaxCost(prices, p.UnreportedMicros+HoldMargin.Microseconds())
	if !ok {
		return 0
	}
	return max(max(p.Hold.Balance()-need, 0)-p.dearer(m, prices), 0)
}

// RecoverLease rebuilds a lease that a restored hub has forgotten from the message that its node kept. last is the
// newest lease that the hub knows: leases in between are lost, and stand for the time since when leases have covered it
// without a gap. The prices carry no host share. lacks is what the hold needs for the cap.
func RecoverLease(m Member, last Lease, h Hold, in *protocol.Lease) (l Lease, lacks int64) {
	expires := in.GetExpiresAt().AsTime().Truncate(time.Microsecond)
	l = Lease{
		MemberID: m.ID, No: int64(in.GetLeaseNo()), NodeID: m.NodeID, Currency: in.GetCurrency(), CapNanos: in.GetCapNanos(),
		IssuedAt: expires.Add(-time.Duration(in.GetDurationSeconds()) * time.Second), ExpiresAt: expires,
		EndPolicy: in.GetEndPolicy(),
	}
	l.CoveredSince = l.IssuedAt
	if in.GetCoveredSince().IsValid() {
		l.CoveredSince = earliest(l.IssuedAt, in.GetCoveredSince().AsTime().Truncate(time.Microsecond))
	}
	if last.No > 0 && l.No > last.No+1 {
		l.IssuedAt = earliest(l.IssuedAt, latest(l.CoveredSince, last.ExpiresAt))
	}
	for _, p := range in.GetPrices() {
		l.Prices = append(l.Prices, FrozenPrice{
			Meter: p.GetMeter(), PriceID: p.GetPriceId(), Nanos: p.GetPriceNanos(), PerQuantity: p.GetPerQuantity(),
		})
	}
	return l, max(in.GetCapNanos()-(h.Placed-h.Released), 0)
}
