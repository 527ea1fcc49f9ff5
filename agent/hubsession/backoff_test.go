package hubsession_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/agent/hubsession"
)

var errLost = errors.New("the connection is lost")

func TestPausesGrowToTheirCapAndStartAgainAfterAGoodSession(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var b hubsession.Backoff
		bound := hubsession.DialRetryMin
		for range rapid.IntRange(1, 40).Draw(t, "dials") {
			lasted := time.Duration(rapid.Int64Range(0, int64(10*time.Minute)).Draw(t, "lasted"))
			if rapid.Bool().Draw(t, "failed") {
				lasted = 0
			}
			if lasted > 10*bound {
				bound = hubsession.DialRetryMin
			}
			p := b.Pause(lasted, errLost, rapid.Float64Range(0, 0.999999).Draw(t, "random"))
			require.GreaterOrEqual(t, p, bound/2)
			require.LessOrEqual(t, p, bound)
			bound = min(2*bound, hubsession.DefaultDialRetryMax)
		}
	})
}

func TestNewIncarnationDialsAgainAtOnce(t *testing.T) {
	var b hubsession.Backoff
	for range 10 {
		b.Pause(0, errLost, 0.5)
	}
	require.LessOrEqual(t, b.Pause(0, hubsession.ErrNewIncarnation, 0.999), hubsession.DialRetryMin)
}

// fleet is how many nodes lose their hub at the same moment.
const fleet = 10_000

// busiest is the largest number of dials within one second.
func busiest(dials []time.Duration) (most int) {
	slices.Sort(dials)
	first := 0
	for last := range dials {
		for dials[last]-dials[first] > time.Second {
			first++
		}
		most = max(most, last-first+1)
	}
	return most
}

func TestNodesThatAHubSendsAwayComeBackSpread(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	var dials []time.Duration
	for range fleet {
		var b hubsession.Backoff
		dials = append(dials, b.Pause(time.Hour, fmt.Errorf("%w: restart", hubsession.ErrGoAway), random.Float64()))
	}
	require.LessOrEqual(t, busiest(dials), fleet*13/10/int(hubsession.GoAwaySpread/time.Second))
}

// After a long absence of the hub the fleet dials at an even rate: whenever the hub is back, a few hundred come in each
// second.
func TestNodesOfAHubThatWasAwayForLongDialAtAnEvenRate(t *testing.T) {
	const (
		away    = 10 * time.Minute
		timeout = 10 * time.Second // of each dial
	)
	random := rand.New(rand.NewPCG(3, 4))
	var late []time.Duration
	for range fleet {
		var b hubsession.Backoff
		for at := b.Pause(time.Hour, errLost, random.Float64()); at < away+time.Minute; at += timeout + b.Pause(0, errLost,
			random.Float64()) {
			if at > away {
				late = append(late, at)
			}
		}
	}
	// Each dials once in timeout and three quarters of hubsession.DefaultDialRetryMax.
	even := fleet / int((timeout+hubsession.DefaultDialRetryMax*3/4)/time.Second)
	require.LessOrEqual(t, busiest(late), even*13/10)
}
