package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestALineIsFoundThroughItsPoints(t *testing.T) {
	l := fit([]float64{1000, 3000, 10_000}, []float64{150, 250, 600})
	require.InDelta(t, 0.05, l.slope, 1e-9)
	require.InDelta(t, 100, l.intercept, 1e-9)
	// The squares of the distances decide: the middle of points at one place, and between scattered ones.
	require.Equal(t, line{0, 15}, fit([]float64{2, 2}, []float64{10, 20}))
	require.InDelta(t, 1.5, fit([]float64{0, 1, 2}, []float64{0, 3, 3}).slope, 1e-9)
}

func TestMemoryOfANodeIsTheSlope(t *testing.T) {
	results := slopes([]memoryAt{{1000, 150, 210}, {3000, 250, 230}, {10_000, 600, 300}}, 10)
	require.Equal(t, "memory-nodes.hub", results[0].Name)
	require.InDelta(t, 50, results[0].P50, 1e-9)
	require.True(t, results[0].Reached)
	require.Contains(t, results[0].Parts, Part{"with 3000 nodes, MB", 250})
	require.InDelta(t, 10, results[1].P50, 1e-9)
	require.False(t, slopes([]memoryAt{{0, 0, 0}, {1, 1, 0}}, 10)[0].Reached, "1,000 KB a node")
}

func TestGrowthLeavesTheBeginningOut(t *testing.T) {
	var g growth
	for i := range 60 {
		mb := 100.0
		if i >= 10 {
			mb = 150 + float64(i)/60 // a MB an hour
		}
		g.MB = append(g.MB, mb)
	}
	require.InDelta(t, 1, g.perHour(time.Minute), 1e-9)
	require.True(t, g.result("x", "x", time.Minute).Reached)
	g.MB[59] += 60
	require.False(t, g.result("x", "x", time.Minute).Reached)
}

func TestTheProportionalSetSizeIsRead(t *testing.T) {
	bytes, err := parsePSS([]byte("55d0-7ffd ---p 00000000 00:00 0 [rollup]\nRss:   2000 kB\nPss:   1500 kB\n" +
		"Pss_Anon: 1 kB\n"))
	require.NoError(t, err)
	require.EqualValues(t, 1500<<10, bytes)
	_, err = parsePSS([]byte("Rss: 1 kB\n"))
	require.Error(t, err)
}

func TestWritesAreCountedForEachRecord(t *testing.T) {
	parts := writeParts(Use{Seconds: 10, WALBytes: 5000}, 100, 1e6, 1e6+20_000, 2e6, 2e6+10_000)
	require.Contains(t, parts, Part{"WAL, bytes a record", 500})
	require.Contains(t, parts, Part{"tables grew by, bytes a record", 200})
	require.Contains(t, parts, Part{"indexes grew by, bytes a record", 100})
	require.Contains(t, parts, Part{"indexes before, MB", 2})
}
