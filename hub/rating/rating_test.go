package rating_test

import (
	"math"
	"math/big"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/hub/rating"
)

var noon = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

func at(micros int64) time.Time { return noon.Add(time.Duration(micros) * time.Microsecond) }

func span(from, to int64) rating.Interval { return rating.Interval{From: at(from), To: at(to)} }

const hour = int64(3_600_000_000)

func TestChargeRoundsHalfToEven(t *testing.T) {
	for _, tc := range []struct{ nanos, per, quantity, want int64 }{
		{5, 10, 1, 0},
		{5, 10, 3, 2},
		{5, 10, 5, 2},
		{6, 10, 1, 1},
		{4, 10, 1, 0},
		{3_600_000_000, hour, 1_000_000, 1_000_000},
		{math.MaxInt64, 1, 1, math.MaxInt64},
		{math.MaxInt64, math.MaxInt64, math.MaxInt64, math.MaxInt64},
		{0, 1, math.MaxInt64, 0},
	} {
		got, err := rating.Charge(tc.nanos, tc.per, tc.quantity)
		require.NoError(t, err)
		require.Equal(t, tc.want, got, "%+v", tc)
	}
	_, err := rating.Charge(math.MaxInt64, 1, 2)
	require.ErrorIs(t, err, rating.ErrOverflow)
	_, err = rating.Charge(1, 0, 2)
	require.Error(t, err)
}

func TestRecordSplitsAtHoursAndPrices(t *testing.T) {
	prices := []rating.Price{
		{ID: "old", To: at(hour / 2)},
		{ID: "new", From: at(hour / 2), To: at(2 * hour)},
	}
	got := rating.Split(span(-10, 2*hour+5), 2*hour+15, prices)
	require.Equal(t, []rating.Part{
		{From: at(-10), To: at(0), Hour: noon.Add(-time.Hour), PriceID: "old", Quantity: 10},
		{From: at(0), To: at(hour / 2), Hour: noon, PriceID: "old", Quantity: hour / 2},
		{From: at(hour / 2), To: at(hour), Hour: noon, PriceID: "new", Quantity: hour / 2},
		{From: at(hour), To: at(2 * hour), Hour: noon.Add(time.Hour), PriceID: "new", Quantity: hour},
		{From: at(2 * hour), To: at(2*hour + 5), Hour: noon.Add(2 * time.Hour), Quantity: 5},
	}, got)
}

func TestSplitPreservesTheSum(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		from := rapid.Int64Range(-5*hour, 5*hour).Draw(rt, "from")
		record := span(from, from+rapid.Int64Range(0, 6*hour).Draw(rt, "length"))
		quantity := rapid.OneOf(rapid.Int64Range(0, 1000), rapid.Int64Range(0, math.MaxInt64)).Draw(rt, "quantity")
		edge := rapid.Int64Range(-5*hour, 9*hour).Draw(rt, "edge")
		prices := []rating.Price{{ID: "a", To: at(edge)}, {ID: "b", From: at(edge)}}
		sum, end := int64(0), record.From
		for _, p := range rating.Split(record, quantity, prices) {
			sum += p.Quantity
			if p.Quantity < 0 || !p.From.Equal(end) {
				rt.Fatalf("negative quantity or gap: %+v", p)
			}
			if p.Hour.After(p.From) || p.To.After(p.Hour.Add(time.Hour)) {
				rt.Fatalf("not within its hour: %+v", p)
			}
			if want := map[bool]string{true: "a", false: "b"}[p.From.Before(at(edge))]; p.PriceID != want {
				rt.Fatalf("price of %+v", p)
			}
			end = p.To
		}
		if sum != quantity || !end.Equal(record.To) {
			rt.Fatalf("%d of %d, until %s", sum, quantity, end)
		}
	})
}

func TestTimeSplitsExactly(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		from := rapid.Int64Range(-5*hour, 5*hour).Draw(rt, "from")
		length := rapid.Int64Range(1, 6*hour).Draw(rt, "length")
		for _, p := range rating.Split(span(from, from+length), length, nil) {
			if got := p.To.Sub(p.From).Microseconds(); got != p.Quantity {
				rt.Fatalf("%d µs hold %d", got, p.Quantity)
			}
		}
	})
}

// TestLaw05CuttingAndOrderDoNotChangeTheBill cuts the same running time in two different ways, shuffles it, and posts
// it: the totals by account are the same, and they are the rounded price of each hour.
func TestLaw05CuttingAndOrderDoNotChangeTheBill(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		price := rating.Price{
			ID: "p", Nanos: rapid.Int64Range(0, 1e12).Draw(rt, "nanos"), PerQuantity: rapid.Int64Range(1_000_000, hour).Draw(rt,
				"per"),
			HostBasisPoints: rapid.Int64Range(0, rating.BasisPoints).Draw(rt, "host"),
		}
		length := rapid.Int64Range(1, 3*hour).Draw(rt, "length")
		one := bill(rt, price, length, "one")
		two := bill(rt, price, length, "two")
		if len(one) != len(two) {
			rt.Fatalf("%v and %v", one, two)
		}
		for h, a := range one {
			if a != two[h] {
				rt.Fatalf("hour %s: %+v and %+v", h, a, two[h])
			}
			exact := new(big.Rat).SetFrac(new(big.Int).Mul(big.NewInt(price.Nanos), big.NewInt(a.Quantity)),
				big.NewInt(price.PerQuantity))
			off := exact.Sub(exact, new(big.Rat).SetInt64(a.ChargedNanos))
			if off.Abs(off).Cmp(big.NewRat(1, 2)) > 0 {
				rt.Fatalf("charged %d, off by %s", a.ChargedNanos, off)
			}
		}
	})
}

func bill(rt *rapid.T, price rating.Price, length int64, label string) map[time.Time]rating.Accrual {
	const start = -hour / 3
	cuts := rapid.SliceOfNDistinct(rapid.Int64Range(1, max(length-1, 1)), 0, 12, rapid.ID[int64]).Draw(rt, label+" cuts")
	edges := append([]int64{0, length}, cuts...)
	var parts []rating.Part
	for _, iv := range between(edges, length) {
		parts = append(parts, rating.Split(span(start+iv[0], start+iv[1]), iv[1]-iv[0], []rating.Price{price})...)
	}
	order := rapid.Permutation(parts).Draw(rt, label+" order")
	out := map[time.Time]rating.Accrual{}
	var collected, host int64
	for _, p := range order {
		a, d, err := rating.Accrue(out[p.Hour], price, p.Quantity, math.MaxInt64)
		if err != nil {
			rt.Fatal(err)
		}
		if d.CollectedNanos < 0 || d.HostNanos < 0 || d.HostNanos > d.CollectedNanos+1 {
			rt.Fatalf("posting goes backwards: %+v", d)
		}
		out[p.Hour] = a
		collected += d.CollectedNanos
		host += d.HostNanos
	}
	for _, a := range out {
		collected -= a.ChargedNanos
		host -= a.HostNanos
	}
	if collected != 0 || host != 0 {
		rt.Fatalf("postings miss their accruals by %d and %d", collected, host)
	}
	return out
}

func between(edges []int64, length int64) [][2]int64 {
	set := map[int64]bool{}
	for _, e := range edges {
		set[min(e, length)] = true
	}
	var sorted []int64
	for e := range set {
		sorted = append(sorted, e)
	}
	for i := range sorted {
		for j := i + 1; j < len(sorted); j++ {
			if sorted[j] < sorted[i] {
				sorted[i], sorted[j] = sorted[j], sorted[i]
			}
		}
	}
	var out [][2]int64
	for i := 1; i < len(sorted); i++ {
		out = append(out, [2]int64{sorted[i-1], sorted[i]})
	}
	return out
}

// TestLaw07NoMoreIsCollectedThanIsAvailable: the rest is written off, and nothing of it reaches the host.
func TestLaw07NoMoreIsCollectedThanIsAvailable(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		price := rating.Price{Nanos: rapid.Int64Range(0, 1000).Draw(rt, "nanos"), PerQuantity: rapid.Int64Range(1,
			10).Draw(rt, "per"), HostBasisPoints: 7000}
		hold := rapid.Int64Range(0, 10_000).Draw(rt, "hold")
		left, a := hold, rating.Accrual{}
		for range rapid.IntRange(1, 20).Draw(rt, "records") {
			next, d, err := rating.Accrue(a, price, rapid.Int64Range(0, 100).Draw(rt, "quantity"), left)
			if err != nil {
				rt.Fatal(err)
			}
			a, left = next, left-d.CollectedNanos
		}
		charged, err := rating.Charge(price.Nanos, price.PerQuantity, a.Quantity)
		if err != nil {
			rt.Fatal(err)
		}
		if left < 0 || a.CollectedNanos+a.WrittenOffNanos != charged || a.HostNanos > a.CollectedNanos {
			rt.Fatalf("hold %d, left %d, charged %d, %+v", hold, left, charged, a)
		}
		if charged <= hold && a.WrittenOffNanos != 0 {
			rt.Fatalf("written off although the hold covers it: %+v", a)
		}
	})
}

func TestAffordsIsTheInverseOfChargeUp(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		nanos, per := rapid.Int64Range(1, 1e12).Draw(rt, "nanos"), rapid.Int64Range(1, 1e6).Draw(rt, "per")
		have := rapid.Int64Range(0, 1e12).Draw(rt, "have")
		q := rating.Affords(nanos, per, have)
		cost, err := rating.ChargeUp(nanos, per, q)
		if err != nil || cost > have {
			rt.Fatalf("%d costs %d of %d", q, cost, have)
		}
		if cost, err = rating.ChargeUp(nanos, per, q+1); err == nil && cost <= have {
			rt.Fatalf("%d costs only %d of %d", q+1, cost, have)
		}
	})
	require.Equal(t, int64(math.MaxInt64), rating.Affords(0, 1, 0))
}

func TestTimeAlgebra(t *testing.T) {
	u := rating.Union([]rating.Interval{span(10, 20), span(0, 5), span(5, 8), span(15, 30), span(40, 40)})
	require.Equal(t, []rating.Interval{span(0, 8), span(10, 30)}, u)
	require.Equal(t, []rating.Interval{span(7, 8), span(10, 12)}, rating.Intersect(span(7, 12), u))
	require.Equal(t, []rating.Interval{span(8, 10), span(30, 35)}, rating.Subtract(span(7, 35), u))
	require.Equal(t, []rating.Interval{span(31, 35)}, rating.Subtract(span(31, 35), u))
	require.Empty(t, rating.Subtract(span(11, 12), u))
	rapid.Check(t, func(rt *rapid.T) {
		draw := rapid.Custom(func(rt *rapid.T) rating.Interval {
			from := rapid.Int64Range(0, 100).Draw(rt, "from")
			return span(from, from+rapid.Int64Range(0, 30).Draw(rt, "length"))
		})
		set, i := rating.Union(rapid.SliceOfN(draw, 0, 8).Draw(rt, "set")), draw.Draw(rt, "interval")
		in, out := rating.Intersect(i, set), rating.Subtract(i, set)
		if rating.TotalLength(in)+rating.TotalLength(out) != i.Length() {
			rt.Fatalf("%v is not %v and %v", i, in, out)
		}
	})
}
