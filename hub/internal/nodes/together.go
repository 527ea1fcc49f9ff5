package nodes

import (
	"context"
	"sync"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/hub/internal/recovery"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// maxTogether ends a batch of words: what is said while one is in the database goes into the next. A larger one would
// share what the statements cost in themselves among a few more, and have all of them wait for it.
const maxTogether = 64

// word is a hello, or a report without workloads, on its way into the database.
type word struct {
	peer      nodelink.Peer
	hello     *protocol.Hello
	report    *protocol.Report
	sessionNo uint64

	// Set before done is closed. taken is false for a report that says something new: it wants a transaction of its own.
	greeted greeted
	taken   bool
	err     error
	done    chan struct{}
}

// wait returns when the word is committed, or ctx ends.
func (w *word) wait(ctx context.Context) error {
	select {
	case <-w.done:
		return w.err
	case <-ctx.Done():
		return fault.New(fault.Unavailable, "hub_busy", "The hub is busy with other nodes; dial again in a moment.",
			ctx.Err())
	}
}

// words are what many nodes say at the same time and what costs one transaction together: while one batch is in the
// database, what is said makes up the next. One alone waits for nobody.
type words struct {
	post func(context.Context, []*word)

	mu      sync.Mutex
	waiting []*word
	working bool
}

// put hands a word over. Connections bound how many wait: each says one thing at a time.
func (q *words) put(ctx context.Context, w *word) {
	w.done = make(chan struct{})
	q.mu.Lock()
	defer q.mu.Unlock()
	q.waiting = append(q.waiting, w)
	if !q.working {
		q.working = true
		// The work is not the caller's alone.
		go q.work(context.WithoutCancel(ctx))
	}
}

func (q *words) work(ctx context.Context) {
	for {
		batch := q.next()
		if batch == nil {
			return
		}
		q.post(ctx, batch)
		for _, w := range batch {
			close(w.done)
		}
	}
}

// next takes the words that waited longest, one of each node; nil when there are none and the worker ends.
func (q *words) next() (batch []*word) {
	q.mu.Lock()
	defer q.mu.Unlock()
	speaking := map[string]bool{}
	var later []*word
	for i, w := range q.waiting {
		if len(batch) == maxTogether {
			later = append(later, q.waiting[i:]...)
			break
		}
		if speaking[w.peer.NodeID] {
			later = append(later, w)
			continue
		}
		speaking[w.peer.NodeID] = true
		batch = append(batch, w)
	}
	q.waiting = later
	q.working = batch != nil
	return batch
}

// takeBatch takes words in one transaction and tells each what became of it.
func (i *Service) takeBatch(ctx context.Context, batch []*word) {
	togetherOrAlone(ctx, batch, i.takeTogether)
}

// togetherOrAlone does a batch in one transaction. When that fails for good, one of the batch is to blame: its halves
// are tried, and so on, until only that one fails. Every one of the batch is told by do what became of it.
func togetherOrAlone[T any](ctx context.Context, batch []T, do func(context.Context, []T) error) {
	if err := do(ctx, batch); err == nil || len(batch) == 1 || fault.Is(err, fault.Unavailable) {
		return
	}
	togetherOrAlone(ctx, batch[:len(batch)/2], do)
	togetherOrAlone(ctx, batch[len(batch)/2:], do)
}

func (i *Service) takeTogether(ctx context.Context, batch []*word) error {
	now := i.Now().Truncate(time.Microsecond)
	var hellos, reports []*word
	for _, w := range batch {
		if w.hello != nil {
			hellos = append(hellos, w)
		} else {
			reports = append(reports, w)
		}
	}
	type outcome struct {
		greeted []greeted
		taken   []bool
	}
	out, err := db.RunTx(ctx, i.DB, func(tx db.Tx) (o outcome, err error) {
		if len(hellos) > 0 {
			if o.greeted, err = i.greet(ctx, tx, hellos, now); err != nil {
				return o, err
			}
			failpoint.Hit("hub/hello/written")
		}
		if len(reports) > 0 {
			if o.taken, err = quietReports(ctx, tx, reports, now); err != nil {
				return o, err
			}
		}
		return o, nil
	})
	for n, w := range hellos {
		if w.err = err; err == nil {
			w.greeted, w.err = out.greeted[n], out.greeted[n].refused
		}
	}
	for n, w := range reports {
		if w.err = err; err == nil {
			w.taken = out.taken[n]
		}
	}
	return err
}

// quietReports takes those reports that change nothing but the time at which their node was heard. It is false for the
// others.
func quietReports(ctx context.Context, tx db.Tx, words []*word, now time.Time) ([]bool, error) {
	ids := nodesOf(words)
	hosting, err := instance.Hosting(ctx, tx, ids)
	if err != nil {
		return nil, err
	}
	missed, err := recovery.Among(ctx, tx, ids)
	if err != nil {
		return nil, err
	}
	taken := make([]bool, len(words))
	inventories := map[string][]*protocol.Accelerator{}
	var at []int
	var reports []fleet.Report
	for n, w := range words {
		if hosting[w.peer.NodeID] > 0 || missed[w.peer.NodeID] {
			continue
		}
		at, reports = append(at, n), append(reports, fleetReport(w.peer.NodeID, w.sessionNo, w.report))
	}
	if len(reports) == 0 {
		return taken, nil
	}
	quiet, err := fleet.ObserveQuiet(ctx, tx, reports, now)
	if err != nil {
		return nil, err
	}
	for k, n := range at {
		if taken[n] = quiet[k]; taken[n] {
			inventories[words[n].peer.NodeID] = words[n].report.GetAccelerators()
		}
	}
	return taken, capacity.ApplyInventories(ctx, tx, inventories, now)
}

func nodesOf(words []*word) []string {
	ids := make([]string, 0, len(words))
	for _, w := range words {
		ids = append(ids, w.peer.NodeID)
	}
	return ids
}
