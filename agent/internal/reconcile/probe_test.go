package reconcile

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestServiceIsSeenReadyLateByAnEighthOfItsStartAtMost(t *testing.T) {
	const period = time.Second
	for _, readyAfter := range []time.Duration{time.Millisecond, 30 * time.Millisecond, 400 * time.Millisecond, 3 * time.Second, time.Minute} {
		probes, at := 1, time.Duration(0)
		for at < readyAfter {
			at += untilNextProbe(at, period)
			probes++
		}
		late := at - readyAfter
		require.LessOrEqual(t, late, min(max(readyAfter/8, 5*time.Millisecond), period), "ready after %s", readyAfter)
		require.LessOrEqual(t, probes, 50+int(readyAfter/period), "and is not asked without pause")
	}
}
