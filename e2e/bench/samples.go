package main

import (
	"math"
	"slices"
	"time"
)

// Samples are measurements of one thing.
type Samples []float64

// Add takes a time, in milliseconds.
func (s *Samples) Add(d time.Duration) { *s = append(*s, float64(d.Microseconds())/1000) }

// P is a percentile by the nearest rank; 0 of nothing.
func (s Samples) P(percent float64) float64 {
	if len(s) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s))
	rank := int(math.Ceil(percent / 100 * float64(len(sorted))))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// P50 is the median.
func (s Samples) P50() float64 { return s.P(50) }

// P99 is what one sample in a hundred exceeds. Of too few samples it is infinite, so that it reaches no target.
func (s Samples) P99() float64 {
	if len(s) < minForP99 {
		return math.Inf(1)
	}
	return s.P(99)
}

// Into fills in what the samples say.
func (s Samples) Into(r Result) Result {
	r.N, r.P50, r.P99, r.raw = len(s), s.P50(), s.P99(), s
	return r.honest()
}

// against holds the median against a baseline.
func (r Result) against(baseline float64) Result {
	r.Baseline = baseline
	if baseline > 0 {
		r.Ratio = r.P50 / baseline
	}
	return r
}

// single is a result of one value.
func (r Result) single(value float64) Result {
	r.N, r.P50, r.P99, r.raw = 1, value, 0, Samples{value}
	return r
}

// stopwatch starts to count; the function that it returns says how long it has counted.
func stopwatch() func() time.Duration {
	start := time.Now()
	return func() time.Duration { return time.Since(start) }
}
