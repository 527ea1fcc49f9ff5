package rating_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/hub/rating"
)

// Coverage is the union of what was added, and divides a record as the union does.
func TestCoverageIsTheUnionOfWhatIsBilled(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := rating.NewCoverage(nil)
		var all []rating.Interval
		for range rapid.IntRange(0, 20).Draw(t, "records") {
			from := rapid.Int64Range(0, 200).Draw(t, "from")
			i := span(from, from+rapid.Int64Range(1, 40).Draw(t, "length"))
			union := rating.Union(all)
			free, billed, ok := c.Divide(i, 100)
			require.True(t, ok)
			require.ElementsMatch(t, rating.Subtract(i, union), free)
			require.ElementsMatch(t, rating.Intersect(i, union), billed)
			for _, f := range free {
				c.Add(f)
			}
			all = append(all, i)
			require.Equal(t, rating.Union(all), append([]rating.Interval(nil), c.Spans()...))
		}
		before := rating.Union(all)
		gone, changed := rating.Changes(before, c.Spans())
		require.Empty(t, gone)
		require.Empty(t, changed)
	})
}

// The changes, applied as rows by their beginnings, make one list the other.
func TestChangesMakeOneListTheOther(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := func(label string) []rating.Interval {
			return rating.Union(rapid.SliceOfN(rapid.Custom(func(t *rapid.T) rating.Interval {
				from := rapid.Int64Range(0, 60).Draw(t, "from")
				return span(from, from+rapid.Int64Range(1, 10).Draw(t, "length"))
			}), 0, 12).Draw(t, label))
		}
		before, after := draw("before"), draw("after")
		rows := map[int64]rating.Interval{}
		for _, i := range before {
			rows[i.From.UnixMicro()] = i
		}
		gone, changed := rating.Changes(before, after)
		for _, i := range gone {
			delete(rows, i.From.UnixMicro())
		}
		for _, i := range changed {
			rows[i.From.UnixMicro()] = i
		}
		var got []rating.Interval
		for _, i := range rows {
			got = append(got, i)
		}
		slices.SortFunc(got, func(a, b rating.Interval) int { return a.From.Compare(b.From) })
		require.Equal(t, after, got)
	})
}

// A node that bills in slivers costs a few steps a record, however many slivers there are: counted, not timed.
func TestARecordCostsAFewStepsHoweverFragmentedTheBilledTimeIs(t *testing.T) {
	const billed, records = 100_000, 4096
	var spans []rating.Interval
	for n := range int64(billed) {
		spans = append(spans, span(2*n, 2*n+1))
	}
	c := rating.NewCoverage(spans)
	for n := range int64(records) {
		i := span(2*(billed+n), 2*(billed+n)+1)
		free, _, ok := c.Divide(i, 8)
		require.True(t, ok)
		require.Len(t, free, 1)
		c.Add(free[0])
		// Again, now in the middle of what is billed.
		_, again, ok := c.Divide(span(2*n, 2*n+1), 8)
		require.True(t, ok)
		require.Len(t, again, 1)
	}
	require.LessOrEqual(t, c.Steps, 6*records)
	_, _, ok := c.Divide(span(0, 2*billed), 8)
	require.False(t, ok, "a record over all of them is refused after a few")
	require.LessOrEqual(t, c.Steps, 6*records+16)
}
