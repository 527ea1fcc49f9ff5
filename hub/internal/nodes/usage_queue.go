package nodes

import (
	"cmp"
	"context"
	"hash/fnv"
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
	// lanes is how many batches of usage are posted at once; a node's segments always take the same lane. One: two would
	// conflict, because the predicate locks of a large batch cover whole tables, and each would be posted again and again.
	lanes = 1
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

// delivery is a segment on its way into the books.
type delivery struct {
	store store
	at    usagechain.Link
	usage ledger.Segment
	// signed is the segment as its node signed it (protobuf), for the archive and for setAside.
	signed []byte

	// Set before done is closed.
	reached mark
	err     error
	done    chan struct{}
}

// read checks a verified segment and reads its records.
func read(v protocol.Verified[*protocol.UsageSegment], of store) (*delivery, error) {
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
	return &delivery{store: of, at: at, usage: usage.Signed(signed), signed: signed, done: make(chan struct{})}, nil
}

// wait returns how far the store's chain is posted once the segment is committed.
func (d *delivery) wait(ctx context.Context) (mark, error) {
	select {
	case <-d.done:
		return d.reached, d.err
	case <-ctx.Done():
		return mark{}, ctx.Err()
	}
}

// lane posts segments in batches: while one batch is in the database, what arrives makes up the next. A lone segment
// waits for nobody, and many share one transaction.
type lane struct {
	post func(context.Context, []*delivery)
	room *semaphore.Weighted

	mu sync.Mutex
	// waiting has each node's segments in the order of their arrival, turns the nodes in the order of their first.
	waiting map[string][]*delivery
	turns   []string
	working bool
}

func (i *Service) lane(nodeID string) *lane {
	h := fnv.New32a()
	_, _ = h.Write([]byte(nodeID))
	return &i.usageLanes[h.Sum32()%lanes]
}

// put hands a segment over as soon as there is room; its connection bounds how many of a node wait here.
func (l *lane) put(ctx context.Context, d *delivery) error {
	if err := l.room.Acquire(ctx, d.weight()); err != nil {
		return fault.New(fault.Unavailable, "usage_waits", "The hub has more usage waiting than it holds.", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.waiting == nil {
		l.waiting = map[string][]*delivery{}
	}
	if len(l.waiting[d.store.nodeID]) == 0 {
		l.turns = append(l.turns, d.store.nodeID)
	}
	l.waiting[d.store.nodeID] = append(l.waiting[d.store.nodeID], d)
	if !l.working {
		l.working = true
		// The work is not the caller's alone.
		go l.work(context.WithoutCancel(ctx))
	}
	return nil
}

// weight is what a segment takes of the room: one without records has its place, too.
func (d *delivery) weight() int64 { return int64(max(d.usage.Len(), 1)) }

func (l *lane) work(ctx context.Context) {
	for {
		batch := l.next()
		if batch == nil {
			return
		}
		l.post(ctx, batch)
		for _, d := range batch {
			l.room.Release(d.weight())
			close(d.done)
		}
	}
}

// next takes the longest waiting nodes' segments, nil when there are none and the worker ends. A node's go together,
// because what is kept for each member is then written once for all of them.
func (l *lane) next() (batch []*delivery) {
	l.mu.Lock()
	defer l.mu.Unlock()
	records := 0
	for len(l.turns) > 0 {
		node := l.turns[0]
		queue, n := l.waiting[node], 0
		for n < len(queue) && len(batch) < maxBatchSegments &&
			(len(batch) == 0 || records+queue[n].usage.Len() <= maxBatchRecords) {
			batch, records = append(batch, queue[n]), records+queue[n].usage.Len()
			n++
		}
		if n < len(queue) {
			l.waiting[node] = queue[n:]
			if n > 0 {
				// It had its share: what is left of it waits for the others' turns, however much more it sends.
				l.turns = append(l.turns[1:], node)
			}
			return batch
		}
		delete(l.waiting, node)
		l.turns = l.turns[1:]
	}
	if batch == nil {
		l.turns, l.working = nil, false
	}
	return batch
}

// postBatch posts segments in one transaction and tells each what became of it.
func (i *Service) postBatch(ctx context.Context, batch []*delivery) {
	togetherOrAlone(ctx, batch, i.postTogether)
	i.setAsideUnpostable(ctx, batch)
	var posted []string
	for _, d := range batch {
		if d.err == nil {
			posted = append(posted, d.store.nodeID)
		}
	}
	slices.Sort(posted)
	// After the commit: a member that cannot be settled must not hold up its node's usage. What fails here the periodic
	// pass does.
	if err := i.settle.Of(ctx, slices.Compact(posted), i.Now().Truncate(time.Microsecond)); err != nil {
		i.Log.WarnContext(ctx, "members not settled", slog.Any("error", err))
	}
}

// verdict is what became of one segment of a batch.
type verdict struct {
	reached mark
	err     error
}

func (i *Service) postTogether(ctx context.Context, batch []*delivery) error {
	now := i.Now().Truncate(time.Microsecond)
	verdicts, err := db.RunTx(ctx, i.DB, func(tx db.Tx) ([]verdict, error) { return postSegments(ctx, tx, batch, now) })
	for n, d := range batch {
		d.err = err
		if err == nil {
			d.reached, d.err = verdicts[n].reached, verdicts[n].err
		}
	}
	return err
}

// postSegments judges each segment by its store's chain and posts those that are new.
func postSegments(ctx context.Context, tx db.Tx, batch []*delivery, now time.Time) ([]verdict, error) {
	stores := make([]store, 0, len(batch))
	for _, d := range batch {
		stores = append(stores, d.store)
	}
	slices.SortFunc(stores, store.compare)
	stores = slices.Compact(stores)
	chains, err := lockMarks(ctx, tx, stores, now)
	if err != nil {
		return nil, err
	}
	if err := loadAhead(ctx, tx, stores, chains); err != nil {
		return nil, err
	}
	isNew, verdicts := make([]bool, len(batch)), make([]verdict, len(batch))
	for n, d := range batch {
		isNew[n], verdicts[n].err = chains[d.store].take(d.at)
	}
	var fresh []ledger.Segment
	for n, d := range batch {
		verdicts[n].reached = chains[d.store].mark
		if isNew[n] {
			fresh = append(fresh, d.usage.Passed(chains[d.store].mark.LastRecord))
		}
	}
	if len(fresh) == 0 {
		return verdicts, nil
	}
	if _, err := ledger.PostUsage(ctx, tx, now, fresh...); err != nil {
		return nil, err
	}
	failpoint.Hit("hub/usage/posted")
	err = saveChains(ctx, tx, stores, chains, now)
	failpoint.Hit("hub/usage/advanced")
	return verdicts, err
}

// chain is how far one store's segments are posted.
type chain struct {
	mark mark
	// stored is the mark as the database has it, added what was taken since.
	stored mark
	ahead  map[uint64]usagechain.Link
	added  []usagechain.Link
	// misnumbered are segments of this batch that are set aside after it; those behind them continue their numbers.
	misnumbered map[uint64]usagechain.Link
}

// take judges a segment and moves the mark over all that is now there without a gap; isNew is false for one that was
// posted before. One whose record numbers do not continue those of its neighbours is unpostable (isUnpostable): it is
// set aside.
func (c *chain) take(at usagechain.Link) (isNew bool, err error) {
	known, err := c.mark.Check(c.ahead, at)
	if err != nil || known {
		return false, err
	}
	near := c.ahead
	if len(c.misnumbered) > 0 {
		near = maps.Clone(c.ahead)
		maps.Copy(near, c.misnumbered)
	}
	at, err = c.mark.CheckRecords(near, at)
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

// takeAside takes a segment that is set aside: whatever its record numbers are, they count as passed.
func (c *chain) takeAside(at usagechain.Link) (isNew bool, err error) {
	known, err := c.mark.Check(c.ahead, at)
	if err != nil || known {
		return false, err
	}
	at, _ = c.mark.CheckRecords(c.ahead, at)
	c.add(at)
	return true, nil
}

func (c *chain) add(at usagechain.Link) {
	c.ahead[at.Number] = at
	c.added = append(c.added, at)
	c.mark.Watermark = c.mark.Advance(c.ahead)
}
