package reconcile

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestServiceIsSeenReadyLateByAShareOfItsStartAtMost(t *testing.T) {
	const period = time.Second
	for _, readyAfter := range []time.Duration{time.Millisecond, 30 * time.Millisecond, 400 * time.Millisecond, 3 * time.Second, time.Minute} {
		probes, at := 1, time.Duration(0)
		for at < readyAfter {
			at += untilNextProbe(at, 0, period)
			probes++
		}
		late := at - readyAfter
		require.LessOrEqual(t, late, min(max(readyAfter/16, 5*time.Millisecond), period), "ready after %s", readyAfter)
		require.LessOrEqual(t, probes, 110+int(readyAfter/period), "and is not asked without pause")
	}
}

func TestProbeThatTakesLongIsNotRepeatedWithoutPause(t *testing.T) {
	require.Equal(t, 200*time.Millisecond, untilNextProbe(300*time.Millisecond, 100*time.Millisecond, time.Second))
	require.Equal(t, time.Second, untilNextProbe(0, 2*time.Second, time.Second))
}
