package netem

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const draws = 200_000

func fates(c Conditions, n int) [][]time.Duration {
	f := newFate(7, "10.0.0.2", 0)
	all := make([][]time.Duration, n)
	for i := range all {
		all[i] = f.next(c)
	}
	return all
}

func TestZeroConditionsLetEverythingPassAtOnce(t *testing.T) {
	for _, arrivals := range fates(Conditions{}, 1000) {
		require.Equal(t, []time.Duration{0}, arrivals)
	}
}

func TestLossLosesItsShare(t *testing.T) {
	lost := 0
	for _, arrivals := range fates(Conditions{Loss: 0.05}, draws) {
		if len(arrivals) == 0 {
			lost++
		}
	}
	require.InDelta(t, 0.05, float64(lost)/draws, 0.003)
}

func TestBurstsLoseTheirShareInRunsOfTheirLength(t *testing.T) {
	lost, runs, before := 0, 0, false
	for _, arrivals := range fates(Conditions{Bursts: InBursts(0.3, 8)}, draws) {
		now := len(arrivals) == 0
		if now {
			lost++
		}
		if now && !before {
			runs++
		}
		before = now
	}
	require.InDelta(t, 0.3, float64(lost)/draws, 0.02)
	require.InDelta(t, 8, float64(lost)/float64(runs), 0.5)
}

func TestDuplicateDoublesItsShare(t *testing.T) {
	doubled := 0
	for _, arrivals := range fates(Conditions{Duplicate: 0.1}, draws) {
		doubled += len(arrivals) - 1
	}
	require.InDelta(t, 0.1, float64(doubled)/draws, 0.005)
}

func TestDelayAndJitterBoundTheArrival(t *testing.T) {
	var total time.Duration
	const delay, jitter = 300 * time.Millisecond, 100 * time.Millisecond
	for _, arrivals := range fates(Conditions{Delay: delay, Jitter: jitter}, draws) {
		require.Len(t, arrivals, 1)
		require.GreaterOrEqual(t, arrivals[0], delay)
		require.LessOrEqual(t, arrivals[0], delay+jitter)
		total += arrivals[0]
	}
	require.InDelta(t, float64(delay+jitter/2), float64(total/draws), float64(time.Millisecond))
}

func TestCutLosesEverything(t *testing.T) {
	for _, arrivals := range fates(Conditions{Cut: true, Duplicate: 1}, 1000) {
		require.Empty(t, arrivals)
	}
}

func TestFateFollowsFromTheSeedAndEachDirectionHasItsOwn(t *testing.T) {
	c := Conditions{Loss: 0.5}
	once, again := fates(c, 100), fates(c, 100)
	require.Equal(t, once, again)
	draw := func(f *fate) (lost []bool) {
		for range 100 {
			lost = append(lost, len(f.next(c)) == 0)
		}
		return lost
	}
	first := draw(newFate(7, "10.0.0.2", 0))
	for _, other := range []*fate{newFate(8, "10.0.0.2", 0), newFate(7, "10.0.0.3", 0), newFate(7, "10.0.0.2", 1)} {
		require.NotEqual(t, first, draw(other))
	}
}
