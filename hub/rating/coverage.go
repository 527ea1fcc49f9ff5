package rating

import (
	"slices"
	"time"
)

// Coverage is time that is billed: sorted, disjoint intervals that do not touch. Its work for a record grows with the
// intervals that the record overlaps, not with those that there are.
type Coverage struct {
	spans []Interval
	// Steps counts the intervals that were read or moved.
	Steps int
}

// NewCoverage takes sorted, disjoint intervals, which it owns from then on.
func NewCoverage(sorted []Interval) *Coverage { return &Coverage{spans: sorted} }

// Spans are the intervals, in order.
func (c *Coverage) Spans() []Interval { return c.spans }

// Divide gives the parts of i that are not billed yet and those that are. ok is false where there are more than most of
// either.
func (c *Coverage) Divide(i Interval, most int) (free, billed []Interval, ok bool) {
	from := i.From
	for n := c.after(i.From); n < len(c.spans) && c.spans[n].From.Before(i.To); n++ {
		c.Steps++
		s := c.spans[n]
		if s.From.After(from) {
			free = append(free, Interval{from, s.From})
		}
		billed = append(billed, Interval{later(s.From, i.From), earlier(s.To, i.To)})
		if from = s.To; len(free) > most || len(billed) > most {
			return nil, nil, false
		}
	}
	if i.To.After(from) {
		free = append(free, Interval{from, i.To})
	}
	return free, billed, true
}

// Add bills an interval of which nothing is billed yet. It joins what it touches.
func (c *Coverage) Add(i Interval) {
	n := c.after(i.From)
	joinsBefore := n > 0 && c.spans[n-1].To.Equal(i.From)
	joinsAfter := n < len(c.spans) && c.spans[n].From.Equal(i.To)
	switch {
	case joinsBefore && joinsAfter:
		c.spans[n-1].To = c.spans[n].To
		c.Steps += len(c.spans) - n
		c.spans = slices.Delete(c.spans, n, n+1)
	case joinsBefore:
		c.spans[n-1].To = i.To
	case joinsAfter:
		c.spans[n].From = i.From
	default:
		c.Steps += len(c.spans) - n
		c.spans = slices.Insert(c.spans, n, i)
	}
}

// Before reports whether a moment lies before the end of what is billed.
func (c *Coverage) Before(t time.Time) bool {
	n := len(c.spans)
	return n > 0 && t.Before(c.spans[n-1].To)
}

// after is the place of the first interval that ends after a moment; mostly there is none.
func (c *Coverage) after(t time.Time) int {
	c.Steps++
	if n := len(c.spans); n == 0 || !c.spans[n-1].To.After(t) {
		return n
	}
	n, _ := slices.BinarySearchFunc(c.spans, t, func(s Interval, t time.Time) int {
		if s.To.After(t) {
			return 1
		}
		return -1
	})
	return n
}

// Changes gives what has to be removed and written to make one sorted list of disjoint intervals another, by their
// beginnings.
func Changes(before, after []Interval) (gone, changed []Interval) {
	n := 0
	for _, a := range after {
		for n < len(before) && before[n].From.Before(a.From) {
			gone = append(gone, before[n])
			n++
		}
		if n < len(before) && before[n].From.Equal(a.From) {
			if !before[n].To.Equal(a.To) {
				changed = append(changed, a)
			}
			n++
			continue
		}
		changed = append(changed, a)
	}
	return append(gone, before[n:]...), changed
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}
