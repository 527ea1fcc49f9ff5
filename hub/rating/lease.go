package rating

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"math"
	"slices"
	"sort"
	"time"
)

// Cost is the most that so many microseconds of running can cost, in nanos; ok is false when it is out of range.
type Cost func(micros int64) (nanos int64, ok bool)

// Affordable is the longest lease up to the wish that wallet and hold cover, in whole seconds, and what the hold lacks
// for it. unreported microseconds may have been run and not reported; margin is held beyond the end.
func Affordable(cost Cost, held, wallet, unreported int64, wish,
	margin time.Duration,
) (duration time.Duration, lacks int64) {
	need := func(d time.Duration) int64 {
		nanos, ok := cost(unreported + (d + margin).Microseconds())
		if !ok {
			return math.MaxInt64
		}
		return max(nanos-held, 0)
	}
	if n := need(wish); n <= wallet {
		return wish, n
	}
	longest := sort.Search(int(wish/time.Second), func(seconds int) bool {
		return need(time.Duration(seconds+1)*time.Second) > wallet
	})
	duration = time.Duration(longest) * time.Second
	return duration, need(duration)
}

// Cap is what a member may spend in all under its next lease: what was ever held for it, and the cost of what it
// measured and nobody is billed for. The node counts all that it measured; without the second part, usage in suspense
// would use up the lease.
func Cap(placed, suspendedCost int64) int64 {
	if suspendedCost > math.MaxInt64-placed {
		return math.MaxInt64
	}
	return placed + suspendedCost
}

// RenewAfter is how long after its issue a lease is due for renewal: about its half-life, spread by the member's id, so
// that members made together do not renew together for ever.
func RenewAfter(memberID string, leaseNo uint64, duration time.Duration) time.Duration {
	h := fnv.New32a()
	_, _ = fmt.Fprintf(h, "%s/%d", memberID, leaseNo)
	share := 40 + int64(h.Sum32()%21)
	return duration / 100 * time.Duration(share)
}

// Window is the time that a lease covers.
type Window struct {
	LeaseNo int64
	Interval
}

// Leases are the windows of one member's leases. NewLeases makes it.
type Leases struct {
	// windows are ordered by their beginning; until is the latest end among those up to each of them.
	windows []Window
	until   []time.Time
}

// NewLeases takes windows in any order; they may overlap.
func NewLeases(windows []Window) Leases {
	l := Leases{windows: slices.Clone(windows), until: make([]time.Time, len(windows))}
	slices.SortFunc(l.windows, func(a, b Window) int {
		return cmp.Or(a.From.Compare(b.From), cmp.Compare(a.LeaseNo, b.LeaseNo))
	})
	for n, w := range l.windows {
		l.until[n] = w.To
		if n > 0 && l.until[n-1].After(w.To) {
			l.until[n] = l.until[n-1]
		}
	}
	return l
}

// overlapping returns the windows that have time in common with usage.
func (l Leases) overlapping(usage Interval) []Window {
	n, _ := slices.BinarySearchFunc(l.windows, usage.To, func(w Window, end time.Time) int { return w.From.Compare(end) })
	var out []Window
	for n--; n >= 0 && l.until[n].After(usage.From); n-- {
		if l.windows[n].To.After(usage.From) {
			out = append(out, l.windows[n])
		}
	}
	return out
}

// Whole gives the lease that rates all of a usage, where that is plain from the latest window; nearly every record's
// is.
func (l Leases) Whole(usage Interval, named int64) (leaseNo int64, ok bool) {
	n := len(l.windows) - 1
	if n < 0 || usage.From.Before(l.windows[n].From) || usage.To.After(l.windows[n].To) {
		return 0, false
	}
	alone := n == 0 || !l.until[n-1].After(usage.From)
	return l.windows[n].LeaseNo, alone || l.windows[n].LeaseNo == named
}

// LeasedPart is a piece of usage that one lease rates; LeaseNo is 0 where no window holds it.
type LeasedPart struct {
	Interval
	Quantity int64
	LeaseNo  int64
}

// Divide assigns usage to the leases that rate it: each piece to one whose window holds it. The lease that the node
// named counts only among those; otherwise the lowest number does.
func (l Leases) Divide(usage Interval, quantity, named int64) []LeasedPart {
	windows := l.overlapping(usage)
	cuts := []time.Time{usage.From, usage.To}
	for _, w := range windows {
		inside := !usage.From.Before(w.From) && !usage.To.After(w.To)
		if inside && (w.LeaseNo == named || len(windows) == 1) {
			return []LeasedPart{{usage, quantity, w.LeaseNo}}
		}
		for _, edge := range []time.Time{w.From, w.To} {
			if edge.After(usage.From) && edge.Before(usage.To) {
				cuts = append(cuts, edge)
			}
		}
	}
	slices.SortFunc(cuts, time.Time.Compare)
	cuts = slices.CompactFunc(cuts, time.Time.Equal)
	var parts []LeasedPart
	var spans []Interval
	for n := 1; n < len(cuts); n++ {
		piece := Interval{cuts[n-1], cuts[n]}
		no := rates(windows, piece, named)
		if last := len(parts) - 1; last >= 0 && parts[last].LeaseNo == no {
			parts[last].To, spans[last].To = piece.To, piece.To
			continue
		}
		parts, spans = append(parts, LeasedPart{Interval: piece, LeaseNo: no}), append(spans, piece)
	}
	for n, q := range Divide(quantity, spans) {
		parts[n].Quantity = q
	}
	return parts
}

func rates(windows []Window, piece Interval, named int64) (no int64) {
	for _, w := range windows {
		switch holds := !piece.From.Before(w.From) && !piece.To.After(w.To); {
		case !holds:
		case w.LeaseNo == named:
			return named
		case no == 0 || w.LeaseNo < no:
			no = w.LeaseNo
		}
	}
	return no
}
