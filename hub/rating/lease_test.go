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
