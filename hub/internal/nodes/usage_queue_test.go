package nodes

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/usagechain"
	"github.com/gpuaas/gpuaas/protocol"
)

// arriving is a segment of a node with so many records.
func arriving(t *testing.T, node string, records int) *queuedSegment {
	t.Helper()
	seg := &protocol.UsageSegment{}
	for n := range records {
		seg.Records = append(seg.Records, &protocol.UsageRecord{Sequence: uint64(n + 1)})
	}
	usage, err := ledger.ReadSegment(node, "i", seg)
	require.NoError(t, err)
	return &queuedSegment{store: store{node, "i"}, usage: usage, done: make(chan struct{})}
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
				line += fmt.Sprintf("%s%d ", d.store.nodeID, d.usage.Len()%(maxBatchRecords/4))
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
		posted := 0
		for _, batch := range *batches {
			posted += len(batch)
		}
		require.Equal(t, 3, posted)
		require.True(t, q.capacity.TryAcquire(10), "all capacity is free again")
	})
}

// link is the nth segment of a chain in which each has the payload digest of its number.
func link(number, first, last uint64) usagechain.Link {
	l := usagechain.Link{Number: number, SHA256: []byte{byte(number)}, First: first, Last: last}
	if number > 1 {
		l.Previous = []byte{byte(number - 1)}
	}
	return l
}

// Segments that skip numbers are set aside alike, whether they come in one batch or one by one; what follows them goes
// on.
func TestChainTakesNoSegmentThatSkipsRecordNumbers(t *testing.T) {
	sent := []usagechain.Link{
		link(1, 1, 1), link(2, 3, 3), link(3, 5, 5), link(4, 6, 9), link(5, 8, 9), link(6, 10, 10),
		link(7, 12, 12),
	}
	together, oneByOne := &chain{ahead: map[uint64]usagechain.Link{}}, &chain{ahead: map[uint64]usagechain.Link{}}
	var refused, aside []uint64
	for _, at := range sent {
		isNew, err := together.accept(at)
		require.Equal(t, err == nil, isNew)
		if err != nil {
			require.True(t, isUnpostable(t.Context(), err))
			refused = append(refused, at.Number)
		}
		if _, err := oneByOne.accept(at); err != nil {
			oneByOne.misnumbered = nil
			isNew, err = oneByOne.acceptSetAside(at)
			require.NoError(t, err)
			require.True(t, isNew)
			aside = append(aside, at.Number)
		}
	}
	require.Equal(t, []uint64{2, 3, 5, 7}, refused)
	require.Equal(t, refused, aside)
	require.Equal(t, usagechain.Watermark{Number: 7, SHA256: []byte{7}, LastRecord: 12}, oneByOne.watermark.Watermark)

	require.EqualValues(t, 1, together.watermark.Number, "what is set aside is passed after the batch")
	for _, number := range refused {
		_, err := together.acceptSetAside(sent[number-1])
		require.NoError(t, err)
	}
	require.Equal(t, oneByOne.watermark.Watermark, together.watermark.Watermark)
	require.Empty(t, together.ahead)
	for _, at := range sent {
		isNew, err := together.accept(at)
		require.NoError(t, err, "what was passed is known")
		require.False(t, isNew)
	}
	isNew, err := together.accept(link(8, 13, 20))
	require.NoError(t, err)
	require.True(t, isNew)
}
