package billing_test

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/rating"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestAPostingBalancesInEachCurrency(t *testing.T) {
	leg := func(currency string, nanos int64) billing.Leg {
		return billing.Leg{Account: "a", Currency: currency, Nanos: nanos}
	}
	for name, c := range map[string]struct {
		legs []billing.Leg
		want string
	}{
		"a transfer":           {billing.Transfer("a", "b", "EUR", 7), ""},
		"two currencies":       {[]billing.Leg{leg("EUR", 1), leg("USD", 2), leg("EUR", -1), leg("USD", -2)}, ""},
		"one leg":              {[]billing.Leg{leg("EUR", 1)}, "two legs"},
		"one unit is missing":  {[]billing.Leg{leg("EUR", 2), leg("EUR", -1)}, "sum to 1"},
		"across currencies":    {[]billing.Leg{leg("EUR", 1), leg("USD", -1)}, "not to zero"},
		"a leg of nothing":     {[]billing.Leg{leg("EUR", 1), leg("EUR", 0), leg("EUR", -1)}, "incomplete"},
		"without an account":   {[]billing.Leg{{Currency: "EUR", Nanos: 1}, leg("EUR", -1)}, "incomplete"},
		"without a currency":   {[]billing.Leg{leg("", 1), leg("", -1)}, "incomplete"},
		"no opposite":          {[]billing.Leg{leg("EUR", math.MinInt64), leg("EUR", 1)}, "incomplete"},
		"above the range":      {[]billing.Leg{leg("EUR", math.MaxInt64), leg("EUR", 1)}, "out of range"},
		"below the range":      {[]billing.Leg{leg("EUR", -math.MaxInt64), leg("EUR", -2)}, "out of range"},
		"at the range's bound": {[]billing.Leg{leg("EUR", math.MaxInt64), leg("EUR", -math.MaxInt64)}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			err := billing.Balanced(c.legs)
			if c.want == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, c.want)
			}
		})
	}
}

// A wallet that affords less than the wish gets a shorter lease, if that is worth it.
func TestALeaseIsAsLongAsTheWalletAffords(t *testing.T) {
	noon := time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
	next := func(minutes int64, leasedUntil time.Time) (time.Duration, bool) {
		l, lacks, ok := billing.NextLease(billing.Member{ID: "m", NodeID: "n", OpenedAt: noon},
			billing.Past{LeasedUntil: leasedUntil}, billing.Wish{
				Now: noon, Duration: time.Hour, Currency: "EUR", WalletNanos: minutes * 60,
				Prices: []billing.FrozenPrice{{Meter: protocol.MeterSessionSeconds, Nanos: 1, PerQuantity: 1_000_000}},
			})
		if !ok {
			require.Zero(t, l)
			require.Zero(t, lacks)
			return 0, false
		}
		return l.ExpiresAt.Sub(noon), true
	}
	margin := int64(billing.HoldMargin / time.Minute)
	for name, c := range map[string]struct {
		minutes int64
		until   time.Duration
		want    time.Duration
		ok      bool
	}{
		"enough for the wish":            {margin + 60, 0, time.Hour, true},
		"enough for half of it":          {margin + 30, 0, 30 * time.Minute, true},
		"enough for the shortest":        {margin + 15, 0, 15 * time.Minute, true},
		"less than the shortest":         {margin + 14, 0, 0, false},
		"no longer than the present one": {margin + 30, 30 * time.Minute, 0, false},
		"longer than the present one":    {margin + 30, 29 * time.Minute, 30 * time.Minute, true},
		"the wish, though no longer":     {margin + 60, 2 * time.Hour, time.Hour, true},
	} {
		t.Run(name, func(t *testing.T) {
			got, ok := next(c.minutes, noon.Add(c.until))
			require.Equal(t, c.ok, ok)
			require.Equal(t, c.want, got)
		})
	}
}

func TestTheNewestOfNoLeasesIsNone(t *testing.T) {
	require.Zero(t, billing.NewLeases(nil).Newest())
	one := billing.Lease{MemberID: "m", No: 4}
	require.Equal(t, one, billing.NewLeases([]billing.Lease{one}).Newest())
	require.Zero(t, billing.Leases{}.Newest())
}

// A record that is right for the most part is billed for that part, and the rest names why.
func TestEachPartOfARecordIsBilledOrNamesWhyNot(t *testing.T) {
	noon := time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
	type parts map[string]int64
	charge := func(meter string, from, to time.Duration, quantity int64) parts {
		book := billing.NewBook()
		book.Members["m"] = &billing.Member{ID: "m", NodeID: "n", OpenedAt: noon, CPUMillis: 200, MemoryBytes: 100}
		book.Leases["m"] = billing.NewLeases([]billing.Lease{{
			MemberID: "m", No: 1, NodeID: "n", IssuedAt: noon.Add(time.Minute), ExpiresAt: noon.Add(time.Hour),
		}})
		records := []*billing.Record{{
			Store: billing.Store{NodeID: "n", Incarnation: "i1"}, Sequence: 1, MemberID: "m", RunID: "r", LeaseNo: 1,
			Meter: meter, Quantity: quantity, Span: rating.Interval{From: noon.Add(from), To: noon.Add(to)},
		}}
		book.Prepare(records)
		batch, err := book.Charge(noon.Add(2*time.Hour), records)
		require.NoError(t, err)
		out := parts{}
		for _, a := range batch.Accepted {
			out["billed"] += a.Quantity
		}
		for _, s := range batch.Suspended {
			out[s.Piece.Reason] += s.Piece.Quantity
		}
		return out
	}
	minute := time.Minute.Microseconds()
	require.Equal(t, parts{"billed": minute}, charge(protocol.MeterSessionSeconds, time.Minute, 2*time.Minute, minute))
	require.Equal(t, parts{"billed": minute, billing.SuspenseOutsideLease: minute},
		charge(protocol.MeterSessionSeconds, 0, 2*time.Minute, 2*minute))
	require.Equal(t, parts{"billed": minute, billing.SuspenseOutsideLease: minute, billing.SuspenseOutsideClaim: minute},
		charge(protocol.MeterSessionSeconds, -time.Minute, 2*time.Minute, 3*minute))
	require.Equal(t, parts{"billed": minute, billing.SuspenseOutsideLease: minute},
		charge(protocol.MeterSessionSeconds, 59*time.Minute, 61*time.Minute, 2*minute))
	require.Equal(t, parts{"billed": 100 * 60, billing.SuspenseBeyondLimit: 1},
		charge(protocol.MeterMemoryByteSeconds, time.Minute, 2*time.Minute, 100*60+1))
	// A start costs processor time before the limit holds, also that of a run that ends at once.
	const brief = time.Minute + 10*time.Millisecond
	require.Equal(t, parts{"billed": 292_000}, charge(protocol.MeterCPUSeconds, time.Minute, brief, 292_000))
	require.Equal(t, parts{"billed": 292_000, billing.SuspenseBeyondLimit: 8_000},
		charge(protocol.MeterCPUSeconds, time.Minute, brief, 300_000))
}
