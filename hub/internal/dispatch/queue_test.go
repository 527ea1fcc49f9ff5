package dispatch

import (
	"testing"

	"github.com/stretchr/testify/require"
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
