package billing_test

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/rating"
)

// What is reserved costs its time at the prices of that time, however often and however late it is billed: from the
// wallet as long as that has money, and no more than that.
func TestLaw07ReservedTimeIsPaidByTheWalletAndNeverByMore(t *testing.T) {
	start := time.Date(2026, 11, 1, 10, 20, 0, 0, time.UTC)
	rapid.Check(t, func(rt *rapid.T) {
		later := start.Add(time.Duration(rapid.Int64Range(1, 20*3600).Draw(rt, "new price")) * time.Second)
		prices := []rating.Price{
			{ID: "a", Nanos: rapid.Int64Range(0, 5e9).Draw(rt, "a"), PerQuantity: 3_600_000_000, To: later},
			{ID: "b", Nanos: rapid.Int64Range(0, 5e9).Draw(rt, "b"), PerQuantity: 3_600_000_000, From: later},
		}
		wallet := rapid.Int64Range(0, 50e9).Draw(rt, "wallet")
		granted := wallet
		r, book := billing.Reserved{ID: "x", Meter: "m", Prices: prices, Until: start}, billing.NewBook()
		var collected, writtenOff, quantity int64
		for range rapid.IntRange(1, 6).Draw(rt, "accruals") {
			now := r.Until.Add(time.Duration(rapid.Int64Range(0, 5*3600e6).Draw(rt, "away")) * time.Microsecond)
			lacks, err := r.Lacks(now, billing.ReservedAhead)
			require.NoError(rt, err)
			placed := min(lacks, wallet)
			wallet -= placed
			r.Hold.Placed += placed
			var charges []billing.Charge
			r, charges, err = r.Accrue(book, now)
			require.NoError(rt, err)
			require.Equal(rt, now, r.Until)
			for _, c := range charges {
				collected += c.Delta.CollectedNanos
				writtenOff += c.Delta.WrittenOffNanos
				quantity += c.Quantity
			}
			require.Equal(rt, collected, r.Hold.Posted)
			require.GreaterOrEqual(rt, r.Hold.Balance(), int64(0))
			require.Equal(rt, granted, wallet+r.Hold.Balance()+collected)
			if writtenOff > 0 {
				require.Zero(rt, wallet, "money was left and time written off")
			}
			exhausted, err := r.Exhausted(now)
			require.NoError(rt, err)
			require.False(rt, exhausted && wallet > 0, "the wallet could have paid")
		}
		require.Equal(rt, r.Until.Sub(start).Microseconds(), quantity)
		var want int64
		for _, part := range rating.Split(rating.Interval{From: start, To: r.Until}, quantity, prices) {
			nanos, err := rating.Charge(prices[part.PriceID[0]-'a'].Nanos, 3_600_000_000, part.Quantity)
			require.NoError(rt, err)
			want += nanos
		}
		require.Equal(rt, want, collected+writtenOff)
	})
}

func TestReservedBytesAreBilledBySecondsAndOverflowIsAnError(t *testing.T) {
	start := time.Date(2026, 11, 1, 10, 0, 0, 0, time.UTC)
	r := billing.Reserved{ID: "x", Meter: "m", OfBytes: true, Bytes: 3, Until: start}
	hour := rating.Interval{From: start, To: start.Add(time.Hour)}
	got, err := r.Quantity(hour)
	require.NoError(t, err)
	require.EqualValues(t, 3*3600, got)
	r.Bytes = 0
	got, err = r.Quantity(hour)
	require.NoError(t, err)
	require.Zero(t, got, "an empty volume is no time")
	r.Bytes = math.MaxInt64
	_, err = r.Quantity(hour)
	require.ErrorIs(t, err, rating.ErrOverflow)
	_, err = r.Lacks(hour.To, 0)
	require.ErrorIs(t, err, rating.ErrOverflow)
	_, _, err = r.Accrue(billing.NewBook(), hour.To)
	require.ErrorIs(t, err, rating.ErrOverflow)
	r.Bytes, r.Prices = 1, []rating.Price{{ID: "p", Nanos: math.MaxInt64, PerQuantity: 1}}
	_, err = r.Lacks(hour.To, 0)
	require.ErrorIs(t, err, rating.ErrOverflow)
	_, err = r.Exhausted(start)
	require.ErrorIs(t, err, rating.ErrOverflow)
	r.Prices[0].PerQuantity = 3600
	lacks, err := r.Lacks(hour.To, 0)
	require.NoError(t, err)
	require.EqualValues(t, math.MaxInt64, lacks)
	_, err = r.Lacks(hour.To, time.Hour)
	require.ErrorIs(t, err, rating.ErrOverflow, "each hour has an amount, and both together have none")
}
