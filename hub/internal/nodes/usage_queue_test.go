package nodes

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/protocol"
)

// arriving is a segment of a node with so many records.
func arriving(t *testing.T, node string, records int) *queuedSegment {
	t.Helper()
	seg := &protocol.UsageSegment{}
	for n := range records {
		seg.Records = append(seg.Records, &protocol.UsageRecord{Sequence: uint64(n + 1)})
	}
	read, err := ledger.ReadSegment(billing.Store{NodeID: node, Incarnation: "i"}, seg, nil)
	require.NoError(t, err)
	return &queuedSegment{Segment: read, done: make(chan struct{})}
}

// slowQueue is a queue whose batches take a second each; it returns those that were posted, too.
func slowQueue() (usageQueue, *[][]*queuedSegment) {
	var batches [][]*queuedSegment
	return newUsageQueue(func(_ context.Context, batch []*queuedSegment) {
		time.Sleep(time.Second)
		batches = append(batches, batch)
	}), &batches
}

func TestSegmentsOfANodeArePostedTogetherInTheirOrderAndNoNodeIsPassedOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, batches := slowQueue()
		var sent []*queuedSegment
		put := func(node string, records int) {
			d := arriving(t, node, records)
			require.NoError(t, q.put(t.Context(), d))
			sent = append(sent, d)
		}
		put("first", 1) // is posted at once; what follows waits
		synctest.Wait()
		for n := range 3 {
			for _, node := range []string{"a", "b", "c"} {
				put(node, maxBatchRecords/4+n)
			}
		}
		for _, d := range sent {
			<-d.done
		}
		var got []string
		for _, batch := range *batches {
			line := ""
			for _, d := range batch {
				line += fmt.Sprintf("%s%d ", d.Store.NodeID, d.Len()%(maxBatchRecords/4))
			}
			got = append(got, line)
		}
		require.Equal(t, []string{"first1 ", "a0 a1 a2 ", "b0 b1 b2 ", "c0 c1 c2 "}, got)
	})
}

// A node that sends more than a batch holds, again and again, keeps nobody waiting for longer than one batch.
func TestANodeThatFloodsTheHubWaitsForTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, _ := slowQueue()
		var last *queuedSegment
		for range 12 {
			last = arriving(t, "flood", maxBatchRecords/2)
			require.NoError(t, q.put(t.Context(), last))
		}
		synctest.Wait()
		start := time.Now()
		small := arriving(t, "small", 1)
		require.NoError(t, q.put(t.Context(), small))
		<-small.done
		require.Equal(t, 3*time.Second, time.Since(start), "the batch that is being posted, the next, and its own")
		<-last.done
	})
}

func TestAWholeFleetThatCatchesUpWaitsOutsideUntilThereIsRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, batches := slowQueue()
		require.True(t, q.capacity.TryAcquire(maxWaitingRecords-10), "ten records may wait")
		require.NoError(t, q.put(t.Context(), arriving(t, "a", 6)))
		require.NoError(t, q.put(t.Context(), arriving(t, "b", 0)))
		start := time.Now()
		require.NoError(t, q.put(t.Context(), arriving(t, "c", 6)), "once the first is posted")
		require.Equal(t, time.Second, time.Since(start))
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		require.Error(t, q.put(ctx, arriving(t, "d", 6)), "its connection has ended meanwhile")
		time.Sleep(time.Minute)
		synctest.Wait()
		posted := 0
		for _, batch := range *batches {
			posted += len(batch)
		}
		require.Equal(t, 3, posted)
		require.True(t, q.capacity.TryAcquire(10), "all capacity is free again")
	})
}
