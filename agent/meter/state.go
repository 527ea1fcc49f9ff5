package meter

import (
	"slices"
	"strings"
	"time"
)

func (s State) clone() State {
	return State{Intervals: slices.Clone(s.Intervals), Members: slices.Clone(s.Members)}
}

func (iv Interval) compare(runID string) int { return strings.Compare(iv.RunID, runID) }
func (m Member) compare(id string) int       { return strings.Compare(m.ID, id) }

// find returns the element of a sorted slice, nil if there is none.
func find[T any](sorted []T, id string, compare func(T, string) int) *T {
	if at, ok := slices.BinarySearchFunc(sorted, id, compare); ok {
		return &sorted[at]
	}
	return nil
}

func (s *State) interval(runID string) *Interval { return find(s.Intervals, runID, Interval.compare) }
func (s *State) member(id string) *Member        { return find(s.Members, id, Member.compare) }

func (s *State) insert(iv Interval) {
	at, _ := slices.BinarySearchFunc(s.Intervals, iv.RunID, Interval.compare)
	s.Intervals = slices.Insert(s.Intervals, at, iv)
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

// Metering reports whether an interval of the member is open.
func (s State) Metering(memberID string) bool {
	return slices.ContainsFunc(s.Intervals, func(iv Interval) bool { return iv.MemberID == memberID })
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
