package rating

import (
	"slices"
	"time"
)

// Union sorts intervals and joins those that touch or overlap; empty ones go.
func Union(in []Interval) []Interval {
	in = slices.DeleteFunc(slices.Clone(in), func(i Interval) bool { return !i.To.After(i.From) })
	slices.SortFunc(in, func(a, b Interval) int { return a.From.Compare(b.From) })
	var out []Interval
	for _, i := range in {
		if n := len(out); n > 0 && !i.From.After(out[n-1].To) {
			if i.To.After(out[n-1].To) {
				out[n-1].To = i.To
			}
			continue
		}
		out = append(out, i)
	}
	return out
}

// Intersect gives the parts of i that lie within the sorted, disjoint intervals of within.
func Intersect(i Interval, within []Interval) []Interval {
	var out []Interval
	for _, w := range within {
		from, to := i.From, i.To
		if w.From.After(from) {
			from = w.From
		}
		if w.To.Before(to) {
			to = w.To
		}
		if to.After(from) {
			out = append(out, Interval{from, to})
		}
	}
	return out
}

// Subtract gives the parts of i that lie outside the sorted, disjoint intervals of without.
func Subtract(i Interval, without []Interval) []Interval {
	var out []Interval
	from := i.From
	for _, w := range without {
		if !w.To.After(from) || !w.From.Before(i.To) {
			continue
		}
		if w.From.After(from) {
			out = append(out, Interval{from, w.From})
		}
		from = w.To
	}
	if i.To.After(from) {
		out = append(out, Interval{from, i.To})
	}
	return out
}

// Span is the whole of time from a moment on; a zero end means no end.
func Span(from, to time.Time) Interval {
	if to.IsZero() {
		to = time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)
	}
	return Interval{from, to}
}

// TotalLength of disjoint intervals, in microseconds.
func TotalLength(in []Interval) int64 {
	var sum int64
	for _, i := range in {
		sum += i.Length()
	}
	return sum
}
