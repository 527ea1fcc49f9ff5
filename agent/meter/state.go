package meter

import (
	"cmp"
	"slices"
	"time"
)

func (s State) clone() State {
	return State{Intervals: slices.Clone(s.Intervals), Members: slices.Clone(s.Members)}
}

func (s *State) interval(runID string) *Interval {
	at, ok := slices.BinarySearchFunc(s.Intervals, runID, func(iv Interval, id string) int {
		return compare(iv.RunID, id)
	})
	if !ok {
		return nil
	}
	return &s.Intervals[at]
}

func (s *State) insert(iv Interval) {
	at, _ := slices.BinarySearchFunc(s.Intervals, iv.RunID, func(iv Interval, id string) int {
		return compare(iv.RunID, id)
	})
	s.Intervals = slices.Insert(s.Intervals, at, iv)
}

func (s *State) member(id string) *Member {
	at, ok := slices.BinarySearchFunc(s.Members, id, func(m Member, id string) int { return compare(m.ID, id) })
	if !ok {
		return nil
	}
	return &s.Members[at]
}

func compare(a, b string) int { return cmp.Compare(a, b) }

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// micros drops what is below a microsecond, so that lengths are whole base units and add up exactly, and the monotonic
// reading, which does not survive a restart.
func micros(t time.Time) time.Time {
	if t.IsZero() {
		return time.Time{}
	}
	return time.UnixMicro(t.UnixMicro()).UTC()
}

// Measured reports whether the run's interval has ended and its records are cut, or never began.
func (s State) Measured(runID string) bool {
	iv := s.interval(runID)
	return iv == nil || iv.StartedAt.IsZero()
}

// MoveTimes moves the times that are set by how much the clock leaps, so that what was a minute ago still is. It
// reports whether any was set.
func MoveTimes(by time.Duration, times ...*time.Time) (moved bool) {
	for _, t := range times {
		if !t.IsZero() {
			*t, moved = t.Add(by), true
		}
	}
	return moved
}
