package main

import (
	"runtime"
	"runtime/debug"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestSmallHeapMayGrowToItsSizeAndALargeOneByItsShare(t *testing.T) {
	const mib = 1 << 20
	for _, c := range []struct {
		heap, counted uint64
		want          int
	}{
		{0, 0, gcPercent},
		{1 * mib, 2 * mib, maxGCPercent},
		{10 * mib, 12 * mib, 240},
		{20 * mib, 25 * mib, 80},
		{30 * mib, 33 * mib, gcPercent},
		{smallHeap, smallHeap, gcPercent},
		{150 * mib, 160 * mib, gcPercent},
	} {
		got := percentFor(c.heap, c.counted)
		require.Equal(t, c.want, got, "%d of %d bytes", c.heap, c.counted)
		if got > gcPercent {
			require.LessOrEqual(t, c.heap+c.counted*uint64(got)/100, uint64(smallHeap), "the next collection comes in time")
		}
	}
}

func TestTheCollectorIsPacedAfterEachCollection(t *testing.T) {
	before := debug.SetGCPercent(100)
	defer debug.SetGCPercent(before)
	paceGC()
	percent := func() int {
		now := debug.SetGCPercent(gcPercent)
		debug.SetGCPercent(now)
		return now
	}
	require.Eventually(t, func() bool {
		runtime.GC()
		return percent() > gcPercent
	}, time.Minute, 10*time.Millisecond, "what a test holds is little")
}
