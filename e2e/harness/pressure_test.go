package harness

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestWaitsGrowBetweenTheSamplesAroundTwoMoments(t *testing.T) {
	start := time.Unix(1000, 0)
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	w := waits{{at(0), 0}, {at(10), 5 * time.Millisecond}, {at(20), 9 * time.Millisecond}, {at(30), 9 * time.Millisecond}}
	require.Equal(t, 4*time.Millisecond, w.between(at(15), at(20)))
	require.Equal(t, 9*time.Millisecond, w.between(at(5), at(500)), "what was sampled")
	require.Zero(t, w.between(at(20), at(30)))
	require.Zero(t, w.between(at(400), at(500)), "nothing was sampled since")
	require.Zero(t, waits(nil).between(at(0), at(10)))
}

func TestTheKernelTellsHowLongProcessesWaited(t *testing.T) {
	_, err := os.Stat("/proc/pressure/cpu")
	before, known := processorWaits()
	require.Equal(t, err == nil, known)
	after, _ := processorWaits()
	require.GreaterOrEqual(t, after, before)
}
