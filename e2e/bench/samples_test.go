package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestPercentilesAreSamplesThatWereTaken(t *testing.T) {
	var s Samples
	require.Zero(t, s.P50())
	for i := range 300 {
		s.Add(time.Duration(300-i) * time.Millisecond)
	}
	require.InDelta(t, 150, s.P50(), 0)
	require.InDelta(t, 297, s.P99(), 0)
	require.InDelta(t, 300, s.P(100), 0)
	require.InDelta(t, 1, s.P(0), 0)
	r := s.Into(Result{}).against(100)
	require.Equal(t, 300, r.N)
	require.InDelta(t, 1.5, r.Ratio, 1e-9)
}

func TestRowsMeasuredAgainReplaceTheirLinesAndNoOthers(t *testing.T) {
	old := []Result{{Name: "a", P50: 1}, {Name: "b.x", P50: 1}, {Name: "b.y", P50: 1}, {Name: "gone", P50: 1}}
	merged := merge(old, []Result{{Name: "b.y", P50: 2}, {Name: "b.z", P50: 2}}, []string{"a", "b"})
	require.Equal(t, []Result{{Name: "a", P50: 1}, {Name: "b.x", P50: 1}, {Name: "b.y", P50: 2}, {Name: "b.z", P50: 2}},
		merged)
}
