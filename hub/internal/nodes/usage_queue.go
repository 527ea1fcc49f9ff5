package nodes

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/usagechain"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// maxBatchRecords and maxBatchSegments end a batch: what arrives while one is being posted goes into the next. A batch
	// has at least one segment, however large.
	maxBatchRecords  = 16_384
	maxBatchSegments = 1024
	// maxWaitingRecords bounds what waits for the books in memory, about 100 MB, however many nodes catch up at once.
	// Beyond it the connections are not read until there is room.
	maxWaitingRecords = 16 * maxBatchRecords
)

// store is one life of a node's spool.
type store struct{ nodeID, incarnation string }

func (s store) compare(o store) int {
	return cmp.Or(strings.Compare(s.nodeID, o.nodeID), strings.Compare(s.incarnation, o.incarnation))
}

// queuedSegment is a segment on its way into the books.
type queuedSegment struct {
	store store
	at    usagechain.Link
	usage ledger.Segment
	// signed is the segment as its node signed it (protobuf), for the archive and for setAside.
	signed []byte

	// Set before done is closed.
	reached watermark
	err     error
	done    chan struct{}
}

// parseSegment checks a verified segment and reads its records.
func parseSegment(v protocol.Verified[*protocol.UsageSegment], of store) (*queuedSegment, error) {
	seg, digest := v.Message(), v.Digest()
	if err := checkSegment(seg, of); err != nil {
		return nil, err
	}
	usage, err := ledger.ReadSegment(of.nodeID, of.incarnation, seg)
	if err != nil {
		return nil, err
	}
	signed, err := proto.Marshal(v.Envelope())
	if err != nil {
		return nil, err
	}
	at := usagechain.Link{Number: seg.GetNumber(), SHA256: digest[:], Previous: seg.GetPreviousSha256()}
	at.First, at.Last = usage.Numbers()
	return &queuedSegment{store: of, at: at, usage: usage.Signed(signed), signed: signed, done: make(chan struct{})}, nil
}

// wait returns how far the store's chain is posted once the segment is committed.
func (d *queuedSegment) wait(ctx context.Context) (watermark, error) {
	select {
	case <-d.done:
		return d.reached, d.err
	case <-ctx.Done():
		return watermark{}, ctx.Err()
	}
}

// usageQueue posts segments in batches: those that arrive while one batch is being committed form the next. There is
// one queue: two batches at once would conflict, because the predicate locks of a large batch cover whole tables.
type usageQueue struct {
	post func(context.Context, []*queuedSegment)
	// capacity bounds the records that wait (maxWaitingRecords).
	capacity *semaphore.Weighted

	mu sync.Mutex
	// waiting has each node's segments in the order of their arrival, order the nodes by their first segment.
	waiting map[string][]*queuedSegment
	order   []string
	working bool
}

// put adds a segment as soon as there is capacity; its connection bounds how many of a node wait here.
func (q *usageQueue) put(ctx context.Context, d *queuedSegment) error {
	if err := q.capacity.Acquire(ctx, d.weight()); err != nil {
		return fault.New(fault.Unavailable, "usage_waits", "The hub has more usage waiting than it holds.", err)
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.waiting == nil {
		q.waiting = map[string][]*queuedSegment{}
	}
	if len(q.waiting[d.store.nodeID]) == 0 {
		q.order = append(q.order, d.store.nodeID)
	}
	q.waiting[d.store.nodeID] = append(q.waiting[d.store.nodeID], d)
	if !q.working {
		q.working = true
		// The batch outlives the caller that starts it.
		go q.work(context.WithoutCancel(ctx))
	}
	return nil
}

// weight is the segment's share of the capacity; an empty segment counts as one record.
func (d *queuedSegment) weight() int64 { return int64(max(d.usage.Len(), 1)) }

func (q *usageQueue) work(ctx context.Context) {
	for {
		batch := q.next()
		if batch == nil {
			return
		}
		q.post(ctx, batch)
		for _, d := range batch {
			q.capacity.Release(d.weight())
			close(d.done)
		}
	}
}

// next takes the longest waiting nodes' segments, nil when there are none and the worker ends. A node's go together,
// because what is kept for each member is then written once for all of them.
func (q *usageQueue) next() (batch []*queuedSegment) {
	q.mu.Lock()
	defer q.mu.Unlock()
	records := 0
	for len(q.order) > 0 {
		node := q.order[0]
		queue, n := q.waiting[node], 0
		for n < len(queue) && len(batch) < maxBatchSegments &&
			(len(batch) == 0 || records+queue[n].usage.Len() <= maxBatchRecords) {
			batch, records = append(batch, queue[n]), records+queue[n].usage.Len()
			n++
		}
		if n < len(queue) {
			q.waiting[node] = queue[n:]
			if n > 0 {
				// The node had its share: the rest waits behind the other nodes, however much more it sends.
				q.order = append(q.order[1:], node)
			}
			return batch
		}
		delete(q.waiting, node)
		q.order = q.order[1:]
	}
	if batch == nil {
		q.order, q.working = nil, false
	}
	return batch
}

// postBatch posts segments in one transaction and gives each its result.
func (svc *Service) postBatch(ctx context.Context, batch []*queuedSegment) {
	commitOrSplit(ctx, batch, svc.tryPostBatch)
	svc.setAsideUnpostable(ctx, batch)
	var posted []string
	for _, d := range batch {
		if d.err == nil {
			posted = append(posted, d.store.nodeID)
		}
	}
	slices.Sort(posted)
	// After the commit: a member that cannot be settled must not hold up its node's usage. What fails here the periodic
	// pass does.
	if err := svc.settle.Of(ctx, slices.Compact(posted), svc.Now().Truncate(time.Microsecond)); err != nil {
		svc.Log.WarnContext(ctx, "members not settled", slog.Any("error", err))
	}
}

// postResult is the result of one segment of a batch.
type postResult struct {
	reached watermark
	err     error
}

func (svc *Service) tryPostBatch(ctx context.Context, batch []*queuedSegment) error {
	now := svc.Now().Truncate(time.Microsecond)
	results, err := db.RunTx(ctx, svc.DB, func(tx db.Tx) ([]postResult, error) {
		return postSegments(ctx, tx, batch, now)
	})
	for n, d := range batch {
		d.err = err
		if err == nil {
			d.reached, d.err = results[n].reached, results[n].err
		}
	}
	return err
}

// postSegments judges each segment by its store's chain and posts those that are new.
func postSegments(ctx context.Context, tx db.Tx, batch []*queuedSegment, now time.Time) ([]postResult, error) {
	stores := make([]store, 0, len(batch))
	for _, d := range batch {
		stores = append(stores, d.store)
	}
	slices.SortFunc(stores, store.compare)
	stores = slices.Compact(stores)
	chains, err := lockWatermarks(ctx, tx, stores, now)
	if err != nil {
		return nil, err
	}
	if err := loadAhead(ctx, tx, stores, chains); err != nil {
		return nil, err
	}
	isNew, results := make([]bool, len(batch)), make([]postResult, len(batch))
	for n, d := range batch {
		isNew[n], results[n].err = chains[d.store].accept(d.at)
	}
	var fresh []ledger.Segment
	for n, d := range batch {
		results[n].reached = chains[d.store].watermark
		if isNew[n] {
			fresh = append(fresh, d.usage.Passed(chains[d.store].watermark.LastRecord))
		}
	}
	if len(fresh) == 0 {
		return results, nil
	}
	if _, err := ledger.PostUsage(ctx, tx, now, fresh...); err != nil {
		return nil, err
	}
	failpoint.Hit("hub/usage/posted")
	err = saveChains(ctx, tx, stores, chains, now)
	failpoint.Hit("hub/usage/advanced")
	return results, err
}

// chain is how far one store's segments are posted.
type chain struct {
	watermark watermark
	// stored is the watermark as the database has it, added the segments posted since.
	stored watermark
	ahead  map[uint64]usagechain.Link
	added  []usagechain.Link
	// misnumbered are segments of this batch that are set aside after it; those behind them continue their numbers.
	misnumbered map[uint64]usagechain.Link
}

// accept checks a segment and advances the watermark; isNew is false for one that was posted before. One whose record
// numbers do not continue those of its neighbours is unpostable (isUnpostable): it is set aside.
func (c *chain) accept(at usagechain.Link) (isNew bool, err error) {
	known, err := c.watermark.Check(c.ahead, at)
	if err != nil || known {
		return false, err
	}
	near := c.ahead
	if len(c.misnumbered) > 0 {
		near = maps.Clone(c.ahead)
		maps.Copy(near, c.misnumbered)
	}
	at, err = c.watermark.CheckRecords(near, at)
	if err != nil {
		if c.misnumbered == nil {
			c.misnumbered = map[uint64]usagechain.Link{}
		}
		c.misnumbered[at.Number] = at
		return false, err
	}
	c.add(at)
	return true, nil
}

// acceptSetAside accepts a segment that is set aside: whatever its record numbers are, they count as passed.
func (c *chain) acceptSetAside(at usagechain.Link) (isNew bool, err error) {
	known, err := c.watermark.Check(c.ahead, at)
	if err != nil || known {
		return false, err
	}
	at, _ = c.watermark.CheckRecords(c.ahead, at)
	c.add(at)
	return true, nil
}

func (c *chain) add(at usagechain.Link) {
	c.ahead[at.Number] = at
	c.added = append(c.added, at)
	c.watermark.Watermark = c.watermark.Advance(c.ahead)
}
