package nodes

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/semaphore"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/usagechain"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/groupcommit"
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

// queuedSegment is a segment that waits to be posted.
type queuedSegment struct {
	store store
	// incarnation is the one that the segment names.
	incarnation string
	at          usagechain.Link
	usage       ledger.Segment
	// signed is the segment as its node signed it (protobuf), for the archive and for setAside.
	signed []byte

	// Set before done is closed: how far the store's chain is posted, or why the segment is not.
	posted watermark
	err    error
	done   chan struct{}
}

// parse checks a verified segment and reads its records.
func (d *queuedSegment) parse(v protocol.Verified[*protocol.UsageSegment]) (err error) {
	seg, digest := v.Message(), v.Digest()
	d.incarnation = seg.GetIncarnation()
	d.at = usagechain.Link{Number: seg.GetNumber(), SHA256: digest[:], Previous: seg.GetPreviousSha256()}
	if err := checkSegment(seg, d.store); err != nil {
		return err
	}
	if d.usage, err = ledger.ReadSegment(d.store.nodeID, d.store.incarnation, seg); err != nil {
		return err
	}
	d.signed, err = proto.Marshal(v.Envelope())
	d.usage = d.usage.Signed(d.signed)
	d.at.First, d.at.Last = d.usage.Numbers()
	return err
}

// weight is the segment's share of the queue's capacity; an empty segment counts as one record.
func (d *queuedSegment) weight() int64 { return int64(max(d.usage.Len(), 1)) }

// usageQueue posts segments in batches, one at a time: two at once would conflict, because the predicate locks of a
// large batch cover whole tables.
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
		return fault.New(fault.Unavailable, "usage_waits", "The hub has more usage waiting than it holds.", err)
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
		node := d.store.nodeID
		if byNode[node] == nil {
			order = append(order, node)
		}
		byNode[node] = append(byNode[node], d)
	}
	for records := 0; len(order) > 0; order = order[1:] {
		node, n := order[0], 0
		queue := byNode[node]
		for n < len(queue) && len(batch) < maxBatchSegments &&
			(len(batch) == 0 || records+queue[n].usage.Len() <= maxBatchRecords) {
			batch, records = append(batch, queue[n]), records+queue[n].usage.Len()
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
	posted watermark
	err    error
}

func (svc *Service) tryPostBatch(ctx context.Context, batch []*queuedSegment) error {
	now := svc.Now().Truncate(time.Microsecond)
	results, err := db.RunTx(ctx, svc.DB, func(tx db.Tx) ([]postResult, error) {
		return postSegments(ctx, tx, batch, now)
	})
	for n, d := range batch {
		d.err = err
		if err == nil {
			d.posted, d.err = results[n].posted, results[n].err
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
		results[n].posted = chains[d.store].watermark
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
