package main

import (
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// breaksAbove is a system whose one objective fails above a load.
func breaksAbove(knee float64) func(float64) (Trial, error) {
	return func(load float64) (Trial, error) {
		return Trial{Objectives: []Objective{{Name: "latency", Got: load, Limit: knee, Unit: "ms"}}}, nil
	}
}

func TestASearchFindsTheKnee(t *testing.T) {
	for _, c := range []struct {
		name                string
		s                   Search
		knee, holds, breaks float64
		tried               []float64
	}{
		{
			"doubles, then bisects",
			Search{Start: 100, Max: 10_000, Resolution: 1.2, Whole: true},
			500, 476, 566,
			[]float64{100, 200, 400, 800, 566, 476},
		},
		{"never fails", Search{Start: 100, Max: 300, Resolution: 1.2}, 1000, 300, 0, []float64{100, 200, 300}},
		{"fails at once, holds below", Search{Start: 100, Max: 300, Resolution: 2}, 60, 50, 100, []float64{100, 50}},
		{
			"never holds",
			Search{Start: 100, Max: 300, Resolution: 2},
			1, 0, 6.25,
			[]float64{100, 50, 25, 12.5, 6.25},
		},
		{
			"only up",
			Search{Start: 100, Max: 1000, Resolution: 2, OnlyUp: true},
			300, 200, 400,
			[]float64{100, 200, 400},
		},
		{
			"only up, never fails",
			Search{Start: 100, Max: 300, Resolution: 2, OnlyUp: true},
			1000, 300, 0,
			[]float64{100, 200, 300},
		},
		{
			"only up, fails at once",
			Search{Start: 100, Max: 300, Resolution: 2, OnlyUp: true},
			1, 0, 100,
			[]float64{100},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			k, err := c.s.find(breaksAbove(c.knee))
			require.NoError(t, err)
			require.Equal(t, c.tried, k.Tried)
			require.InDelta(t, c.holds, k.Holds.Load, 0)
			require.InDelta(t, c.breaks, k.Breaks.Load, 0)
		})
	}
}

func TestASearchEndsCloseToAnyKnee(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := Search{
			Start:      rapid.Float64Range(1, 1000).Draw(t, "start"),
			Resolution: rapid.Float64Range(1.05, 2).Draw(t, "resolution"),
			OnlyUp:     rapid.Bool().Draw(t, "only up"),
		}
		s.Max = s.Start * rapid.Float64Range(1, 100).Draw(t, "range")
		knee := rapid.Float64Range(s.Start, s.Max).Draw(t, "knee")
		k, err := s.find(breaksAbove(knee))
		require.NoError(t, err)
		require.LessOrEqual(t, k.Holds.Load, knee)
		if k.Breaks.Load == 0 {
			require.InDelta(t, s.Max, k.Holds.Load, 0)
			return
		}
		require.Greater(t, k.Breaks.Load, knee)
		require.LessOrEqual(t, k.Breaks.Load, k.Holds.Load*s.Resolution*(1+1e-9))
	})
}

func TestALoadThatFailsOnceIsTriedAgain(t *testing.T) {
	tries := map[float64]int{}
	k, err := Search{Start: 100, Max: 400, Resolution: 2}.find(func(load float64) (Trial, error) {
		tries[load]++
		// 100 misses its objective by accident, 400 for good.
		missed := load == 100 && tries[load] == 1 || load == 400
		return Trial{Objectives: []Objective{{Name: "latency", Got: map[bool]float64{true: 2}[missed], Limit: 1}}}, nil
	})
	require.NoError(t, err)
	require.InDelta(t, 200, k.Holds.Load, 0)
	require.InDelta(t, 400, k.Breaks.Load, 0)
	require.Equal(t, map[float64]int{100: 2, 200: 1, 400: 2}, tries)
}

func TestAKneeSaysWhatFailedWhatLimitsAndWhatIsNext(t *testing.T) {
	k, err := Search{Start: 100, Max: 400, Resolution: 2}.find(func(load float64) (Trial, error) {
		return Trial{
			Objectives: []Objective{{"latency", load, 250, "ms"}, {"lost", 0, 0, "sessions"}},
			Use:        Use{Cores: 2, Busy: 1.9, Hub: 1.1, Database: 0.6},
			Profile:    "main.work 40%",
		}, nil
	})
	require.NoError(t, err)
	r := k.result(Result{Note: "conditions"}, "requests/s")
	require.InDelta(t, 200, r.P50, 0)
	require.Equal(t, "requests/s", r.Unit)
	require.Equal(t, "conditions. tried: 100.0, 200.0, 400.0. at 400.0 fails: latency 400.0 ms (limit 250.0). limited by "+
		"the processors: 1.90 of 2 cores busy, hub 1.10, PostgreSQL 0.60, simulated nodes 0.00, measuring client 0.00, "+
		"others 0.20. "+
		"next step: more cores for the hub, or less work in what its profile names: it takes the most. "+
		"hub's processor time there: main.work 40%", r.Note)
	require.Contains(t, r.Parts, Part{"holds: latency, ms", 200})
	require.Contains(t, r.Parts, Part{"lowest load that fails", 400})
}

func TestAnObjectiveThatWasNotMeasuredIsMissed(t *testing.T) {
	require.Len(t, Trial{Objectives: []Objective{{Got: math.NaN(), Limit: 1}, {Got: 1, Limit: 1}}}.missed(), 1)
}

func TestALimitIsWhatIsUsedUp(t *testing.T) {
	for _, c := range []struct {
		use        Use
		what, next string
	}{
		{Use{Cores: 2, Busy: 1.8, Hub: 0.2, Database: 0.3, Nodes: 0.6, Client: 0.5}, "processors", "another machine"},
		{Use{Cores: 2, Busy: 1.8, Hub: 0.5, Database: 0.9, Nodes: 0.2}, "processors", "PostgreSQL"},
		{Use{Cores: 2, Busy: 1.8, Hub: 0.9, Database: 0.5, Waits: map[string]float64{"Lock": 4}}, "processors", "hub"},
		{Use{Cores: 2, Busy: 1.9, Hub: 0.4, Database: 0.4, Client: 0.1}, "processors", "quiet"},
		{Use{Cores: 2, Busy: 0.5, Waits: map[string]float64{"Lock": 4, "IO": 3}}, "locks of rows", "pg_locks"},
		{Use{Cores: 2, Busy: 0.5, Waits: map[string]float64{"IO": 0.6, "LWLock": 0.6}}, "commits", "disk"},
		{Use{Cores: 4, Busy: 1.2, Hub: 1}, "one part of the hub", "goroutines"},
		{Use{Cores: 2, Busy: 0.4, Hub: 0.2}, "neither", "queues"},
	} {
		l := c.use.limit()
		require.True(t, strings.HasPrefix(l.What, c.what) || strings.Contains(l.What, c.what), l.What)
		require.Contains(t, l.Next, c.next)
	}
}
