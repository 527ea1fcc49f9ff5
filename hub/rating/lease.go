package rating

import (
	"fmt"
	"hash/fnv"
	"math"
	"sort"
	"time"
)

// Cost is the most that so many microseconds of running can cost, in nanos; ok is false when it is out of range.
type Cost func(micros int64) (nanos int64, ok bool)

// Affordable is the longest lease up to the wish that wallet and hold cover, in whole seconds, and what the hold lacks for it.
// unreported microseconds may have been run and not reported; margin is held beyond the end.
func Affordable(cost Cost, held, wallet, unreported int64, wish, margin time.Duration) (duration time.Duration, lacks int64) {
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

// Cap is what a member may spend in all under its next lease: what was ever held for it, and the cost of what it measured and nobody is
// billed for. The node counts all that it measured; without the second part, usage in suspense would use up the lease.
func Cap(placed, suspendedCost int64) int64 {
	if suspendedCost > math.MaxInt64-placed {
		return math.MaxInt64
	}
	return placed + suspendedCost
}

// RenewAfter is how long after its issue a lease is due for renewal: about its half-life, spread by the member's id, so that members
// made together do not renew together for ever.
func RenewAfter(memberID string, leaseNo uint64, duration time.Duration) time.Duration {
	h := fnv.New32a()
	_, _ = fmt.Fprintf(h, "%s/%d", memberID, leaseNo)
	share := 40 + int64(h.Sum32()%21)
	return duration / 100 * time.Duration(share)
}
