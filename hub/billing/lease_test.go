package billing_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/rating"
	"github.com/gpuaas/gpuaas/protocol"
)

// TestLaw05ARestoredHubBillsNoTimeBetweenLeases: leases that a backup lacks are rebuilt from the newest one, as far as
// they covered time without a gap.
func TestLaw05ARestoredHubBillsNoTimeBetweenLeases(t *testing.T) {
	noon := time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
	at := func(hours int) time.Time { return noon.Add(time.Duration(hours) * time.Hour) }
	member := billing.Member{ID: "m", NodeID: "n", OpenedAt: noon}
	var issued []billing.Lease
	for _, hour := range []int{0, 3, 6, 20, 24} { // of six hours each: between 12 and 20 o'clock there is none
		var last billing.Lease
		if n := len(issued); n > 0 {
			last = issued[n-1]
		}
		l, _, ok := billing.NextLease(member, billing.Past{
			LastLease: last.No, LeasedUntil: last.ExpiresAt, CoveredSince: last.CoveredSince,
		}, billing.Wish{
			Now: at(hour), Duration: 6 * time.Hour, Currency: "EUR", WalletNanos: 1 << 50,
			Prices: []billing.FrozenPrice{{Meter: protocol.MeterSessionSeconds, Nanos: 1, PerQuantity: 1_000_000}},
		})
		require.True(t, ok)
		issued = append(issued, l)
	}
	newest := issued[4].Message()
	recovered := func(knows int) rating.Interval {
		var last billing.Lease
		if knows > 0 {
			last = issued[knows-1]
		}
		l, _ := billing.RecoverLease(member, last, billing.Hold{}, newest)
		require.Equal(t, at(20), l.CoveredSince)
		return l.Window()
	}
	for knows, from := range []int{24, 20, 20, 20, 24} {
		require.Equal(t, rating.Interval{From: at(from), To: at(30)}, recovered(knows), "of five it knows %d", knows)
	}
	second := issued[2].Message()
	l, _ := billing.RecoverLease(member, issued[0], billing.Hold{}, second)
	require.Equal(t, rating.Interval{From: at(6), To: at(12)}, l.Window(), "from the end of the one that it knows")
	second.CoveredSince = nil
	l, _ = billing.RecoverLease(member, issued[0], billing.Hold{}, second)
	require.Equal(t, rating.Interval{From: at(6), To: at(12)}, l.Window(), "the lease of an older hub stands for itself")
}
