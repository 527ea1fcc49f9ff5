package rating_test

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/hub/rating"
)

// A lease is as long as the money reaches, to the second, and never longer.
func TestALeaseIsAsLongAsTheMoneyReaches(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		perSecond := rapid.Int64Range(1, 1_000_000).Draw(t, "per second")
		held, wallet := rapid.Int64Range(0, 1e12).Draw(t, "held"), rapid.Int64Range(0, 1e12).Draw(t, "wallet")
		unreported := rapid.Int64Range(0, 1e12).Draw(t, "unreported")
		wish := time.Duration(rapid.Int64Range(1, 7*24*3600).Draw(t, "wish")) * time.Second
		margin := 10 * time.Minute
		cost := func(micros int64) (int64, bool) {
			n, err := rating.ChargeUp(perSecond, 1_000_000, micros)
			return n, err == nil
		}
		need := func(d time.Duration) int64 {
			n, ok := cost(unreported + (d + margin).Microseconds())
			require.True(t, ok)
			return max(n-held, 0)
		}
		d, lacks := rating.Affordable(cost, held, wallet, unreported, wish, margin)
		require.LessOrEqual(t, d, wish)
		require.Equal(t, need(d), lacks)
		if d > 0 {
			require.LessOrEqual(t, lacks, wallet)
		}
		if d < wish {
			require.Greater(t, need(d+time.Second), wallet, "a second more is not covered")
		}
	})
}

// Laws 16 and 17: what went into suspense must not end a lease early.
func TestUsageInSuspenseDoesNotUseUpTheCap(t *testing.T) {
	require.EqualValues(t, 130, rating.Cap(100, 30))
	require.EqualValues(t, math.MaxInt64, rating.Cap(100, math.MaxInt64))
}

func TestRenewalsSpreadAroundHalfLife(t *testing.T) {
	seen := map[time.Duration]bool{}
	for no := range uint64(100) {
		at := rating.RenewAfter("m", no, 100*time.Hour)
		require.GreaterOrEqual(t, at, 40*time.Hour)
		require.LessOrEqual(t, at, 60*time.Hour)
		seen[at] = true
	}
	require.Greater(t, len(seen), 10)
}

// A node that names a lease whose window does not hold the usage must not choose the price by it.
func TestUsageIsRatedByALeaseWhoseWindowHoldsIt(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var windows []rating.Window
		for n := range rapid.IntRange(0, 6).Draw(t, "leases") {
			from := rapid.Int64Range(0, 100).Draw(t, "from")
			windows = append(windows, rating.Window{
				LeaseNo:  int64(n + 1),
				Interval: span(from, from+rapid.Int64Range(1, 60).Draw(t, "length")),
			})
		}
		from := rapid.Int64Range(-10, 160).Draw(t, "usage from")
		usage := span(from, from+rapid.Int64Range(1, 120).Draw(t, "usage length"))
		quantity, named := rapid.Int64Range(0, 1000).Draw(t, "quantity"), rapid.Int64Range(0, 8).Draw(t, "named")
		sum, end := int64(0), usage.From
		if no, ok := rating.NewLeases(windows).Whole(usage, named); ok {
			require.Equal(t, []rating.LeasedPart{{Interval: usage, Quantity: quantity, LeaseNo: no}},
				rating.NewLeases(windows).Divide(usage, quantity, named))
		}
		for _, p := range rating.NewLeases(windows).Divide(usage, quantity, named) {
			require.True(t, p.From.Equal(end) && p.To.After(p.From), "the pieces follow one another")
			sum, end = sum+p.Quantity, p.To
			for _, w := range windows {
				in := rating.Intersect(p.Interval, []rating.Interval{w.Interval})
				switch {
				case w.LeaseNo == p.LeaseNo:
					require.Equal(t, []rating.Interval{p.Interval}, in, "lease %d rates what it does not cover", p.LeaseNo)
				case p.LeaseNo == 0:
					require.Empty(t, in, "lease %d covers what nothing rates", w.LeaseNo)
				case w.LeaseNo == named:
					require.NotEqual(t, []rating.Interval{p.Interval}, in, "the named lease covers it and another rates it")
				}
			}
		}
		require.True(t, end.Equal(usage.To))
		require.Equal(t, quantity, sum)
	})
}
