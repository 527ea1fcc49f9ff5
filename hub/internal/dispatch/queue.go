package dispatch

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
)

const (
	// workers bounds how many nodes are synced at once.
	workers = 8
	// upToDateBatch bounds how many nodes one statement asks about.
	upToDateBatch = 500
)

// queue holds each node once, with the lowest generation that its next state must have; 0 asks for none.
type queue struct {
	mu    sync.Mutex
	nodes map[string]uint64
}

func (q *queue) add(nodeID string, generation uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.nodes == nil {
		q.nodes = map[string]uint64{}
	}
	q.nodes[nodeID] = max(q.nodes[nodeID], generation)
}

// drain empties the queue and returns what it held.
func (q *queue) drain() map[string]uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	nodes := q.nodes
	q.nodes = nil
	return nodes
}

// Enqueue asks for a sync of the node: its desired state or its connection may have changed.
func (d *Dispatcher) Enqueue(nodeID string) { d.EnqueueAtLeast(nodeID, 0) }

// EnqueueAtLeast asks for a sync that gives the node a state of at least the generation: the node holds one that this
// hub does not know.
func (d *Dispatcher) EnqueueAtLeast(nodeID string, generation uint64) {
	d.queue.add(nodeID, generation)
	d.process.Wake()
}

// EnqueueAll starts a pass over all nodes.
func (d *Dispatcher) EnqueueAll() { d.all.Wake() }

// processQueue syncs the nodes in the queue. A few are synced at once. Of many, as when the fleet reconnects, those
// that are up to date are found with a few statements and left out.
func (d *Dispatcher) processQueue(ctx context.Context) error {
	nodes := d.queue.drain()
	if len(nodes) > workers {
		if err := d.dropUpToDate(ctx, nodes); err != nil {
			d.requeue(nodes)
			return err
		}
	}
	return d.syncNodes(ctx, nodes)
}

// SyncAll reloads the keys and syncs the queue, the nodes whose state is outdated, and the connected nodes that do not
// hold the latest documents.
func (d *Dispatcher) SyncAll(ctx context.Context) error {
	changed, err := d.Keys.Reload()
	if err != nil {
		// The current keys stay in use.
		d.Log.ErrorContext(ctx, "keys cannot be read again", slog.Any("error", err))
	}
	if changed {
		d.Log.InfoContext(ctx, "new trust bundle", slog.Uint64("version", d.Keys.Bundle().Version()))
	}
	outdated, err := db.ReadTx(ctx, d.DB, func(tx db.Tx) ([]string, error) {
		return selectOutdated(ctx, tx, d.Keys.State().KeyID())
	})
	if err != nil {
		return err
	}
	nodes := map[string]uint64{}
	for _, id := range d.Link.Nodes() {
		nodes[id] = 0
	}
	if err := d.dropUpToDate(ctx, nodes); err != nil {
		return err
	}
	for _, id := range outdated {
		nodes[id] = 0
	}
	maps.Copy(nodes, d.queue.drain())
	return d.syncNodes(ctx, nodes)
}

// dropUpToDate removes the connected nodes that hold the latest documents and need no particular generation.
func (d *Dispatcher) dropUpToDate(ctx context.Context, nodes map[string]uint64) error {
	var connected []nodelink.AckedState
	for id, generation := range nodes {
		if acked, ok := d.Link.Acked(id); ok && generation == 0 {
			connected = append(connected, acked)
		}
	}
	for batch := range slices.Chunk(connected, upToDateBatch) {
		current, err := db.ReadTx(ctx, d.DB, func(tx db.Tx) (map[string]bool, error) {
			return d.UpToDate(ctx, tx, batch)
		})
		if err != nil {
			return err
		}
		for id := range current {
			delete(nodes, id)
		}
	}
	return nil
}

// requeue puts nodes back that were not synced; the loop retries with backoff.
func (d *Dispatcher) requeue(nodes map[string]uint64) {
	for id, generation := range nodes {
		d.queue.add(id, generation)
	}
}

// syncNodes syncs nodes in parallel. One node's failure is logged and stops no other; the next pass tries again.
func (d *Dispatcher) syncNodes(ctx context.Context, nodes map[string]uint64) error {
	if len(nodes) == 0 {
		return nil
	}
	var group errgroup.Group
	group.SetLimit(workers)
	for id, generation := range nodes {
		group.Go(func() error {
			if err := d.syncNode(ctx, id, generation); err != nil && ctx.Err() == nil {
				d.Log.WarnContext(ctx, "node not brought up to date", slog.String("node_id", id), slog.Any("error", err))
				if errors.Is(err, errConflict) {
					// Many changes at once: retry now and not at the next pass.
					d.EnqueueAtLeast(id, generation)
				}
			}
			return nil
		})
	}
	_ = group.Wait()
	return ctx.Err()
}
