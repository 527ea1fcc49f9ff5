package nodes

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"golang.org/x/sync/semaphore"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/groupcommit"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// maxBatchRecords and maxBatchSegments bound a batch. A batch has at least one segment, however large.
	maxBatchRecords  = 16_384
	maxBatchSegments = 1024
	// maxWaitingRecords bounds the records that wait in memory, about 100 MB, however many nodes catch up at once. Beyond
	// it the usage streams are not read.
	maxWaitingRecords = 16 * maxBatchRecords
)

// queuedSegment is a segment that waits to be posted.
type queuedSegment struct {
	// from is the connection that it came by.
	from origin
	// incarnation is the one that the segment names.
	incarnation string
	ledger.Segment

	// Set before done is closed: how far the store's chain is posted, or why the segment is not.
	posted ledger.Watermark
	err    error
	done   chan struct{}
}

// parse checks a verified segment and reads its records.
func (d *queuedSegment) parse(v protocol.Verified[*protocol.UsageSegment]) (err error) {
	seg, digest := v.Message(), v.Digest()
	d.incarnation, d.Link.Number = seg.GetIncarnation(), seg.GetNumber()
	if err := checkSegment(seg, d.Store); err != nil {
		return err
	}
	read, err := ledger.ReadSegment(d.Store, seg, digest[:])
	if err != nil {
		return err
	}
	d.Segment = read
	d.Envelope, err = proto.Marshal(v.Envelope())
	return err
}

// weight is the segment's share of the queue's capacity; an empty segment counts as one record.
func (d *queuedSegment) weight() int64 { return int64(max(d.Len(), 1)) }

// usageQueue posts segments in batches, one at a time: the larger a batch, the more records share what a member costs.
type usageQueue struct {
	batches *groupcommit.Queue[*queuedSegment]
	// capacity bounds the records that wait (maxWaitingRecords).
	capacity *semaphore.Weighted
}

func newUsageQueue(post func(context.Context, []*queuedSegment)) usageQueue {
	q := usageQueue{capacity: semaphore.NewWeighted(maxWaitingRecords)}
	q.batches = groupcommit.New(nextBatch, func(ctx context.Context, batch []*queuedSegment) {
		post(ctx, batch)
		for _, d := range batch {
			q.capacity.Release(d.weight())
			close(d.done)
		}
	})
	return q
}

// put adds a segment as soon as there is capacity; its connection bounds how many of a node wait here.
func (q usageQueue) put(ctx context.Context, d *queuedSegment) error {
	if err := q.capacity.Acquire(ctx, d.weight()); err != nil {
		return fault.New(fault.Unavailable, codeUsageWaits, "The hub has more usage waiting than it holds.", err)
	}
	q.batches.Put(ctx, d)
	return nil
}

// nextBatch splits off the segments of the nodes that waited longest. Those of one node go together, because the rows
// of each member are then written once for all of them. A node that fills a batch waits behind the others with the
// rest, however much it sends.
func nextBatch(waiting []*queuedSegment) (batch, rest []*queuedSegment) {
	byNode := map[string][]*queuedSegment{}
	var order []string
	for _, d := range waiting {
		node := d.Store.NodeID
		if byNode[node] == nil {
			order = append(order, node)
		}
		byNode[node] = append(byNode[node], d)
	}
	for records := 0; len(order) > 0; order = order[1:] {
		node, n := order[0], 0
		queue := byNode[node]
		for n < len(queue) && len(batch) < maxBatchSegments &&
			(len(batch) == 0 || records+queue[n].Len() <= maxBatchRecords) {
			batch, records = append(batch, queue[n]), records+queue[n].Len()
			n++
		}
		if n < len(queue) {
			byNode[node] = queue[n:]
			if n > 0 {
				order = append(order[1:], node)
			}
			break
		}
	}
	for _, node := range order {
		rest = append(rest, byNode[node]...)
	}
	return batch, rest
}

// postBatch posts segments in one transaction, sets the result of each, and sets aside those that can never be posted.
func (svc *Service) postBatch(ctx context.Context, batch []*queuedSegment) {
	commitOrSplit(ctx, batch, svc.tryPostBatch)
	svc.setAsideUnpostable(ctx, batch)
	var posted []string
	for _, d := range batch {
		if d.err == nil {
			posted = append(posted, d.Store.NodeID)
		}
	}
	slices.Sort(posted)
	// After the commit: a member that cannot be settled must not hold up its node's usage. What fails here the periodic
	// pass does.
	if err := svc.passes.SettleMembersOf(ctx, slices.Compact(posted), svc.Now().Truncate(time.Microsecond)); err != nil {
		svc.Log.WarnContext(ctx, "members not settled", slog.Any("error", err))
	}
}

func (svc *Service) tryPostBatch(ctx context.Context, batch []*queuedSegment) error {
	now := svc.Now().Truncate(time.Microsecond)
	results, err := db.LockTx(ctx, svc.DB, func(tx db.Tx) ([]ledger.Posted, error) {
		return ledger.PostUsage(ctx, tx, now, segmentsOf(batch)...)
	})
	setResults(batch, results, err)
	return err
}

func segmentsOf(batch []*queuedSegment) []ledger.Segment {
	segments := make([]ledger.Segment, len(batch))
	for n, d := range batch {
		segments[n] = d.Segment
	}
	return segments
}

// setResults sets the result of each segment, or the error of their transaction.
func setResults(batch []*queuedSegment, results []ledger.Posted, err error) {
	for n, d := range batch {
		d.err = err
		if err == nil {
			d.posted, d.err = results[n].Reached, results[n].Err
		}
	}
}
