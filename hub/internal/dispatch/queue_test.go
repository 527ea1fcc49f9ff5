package dispatch

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/billing"
)

func TestQueueHoldsEachNodeOnceWithTheHighestGeneration(t *testing.T) {
	var q queue
	require.Empty(t, q.drain())
	q.add("a", 0)
	q.add("b", 7)
	q.add("b", 0)
	q.add("a", 3)
	require.Equal(t, map[string]uint64{"a": 3, "b": 7}, q.drain())
	require.Empty(t, q.drain(), "a drained node is enqueued again only by a new event")
}

// The shortest lease is due at 60 % of its life at the latest, and passes come up to 20 % late.
func TestLeasesAreRenewedInTimeWithAnyResync(t *testing.T) {
	require.Less(t, renewEvery(time.Hour)*6/5, billing.MinLease*4/10)
	require.Equal(t, time.Second, renewEvery(time.Second))
}
