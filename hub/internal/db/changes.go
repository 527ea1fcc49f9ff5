package db

import "sync"

// Changed implements Tx.
func (w *retryingTx) Changed(resourceIDs ...string) { w.changed = append(w.changed, resourceIDs...) }

// Changed implements Tx; a query changes nothing.
func (queryOnly) Changed(...string) {}

// Enqueue implements Tx.
func (w *retryingTx) Enqueue(queue string, items ...string) {
	if w.enqueued == nil {
		w.enqueued = map[string][]string{}
	}
	w.enqueued[queue] = append(w.enqueued[queue], items...)
}

// Enqueue implements Tx; a query changes nothing.
func (queryOnly) Enqueue(string, ...string) {}

// workQueues has who processes the items of each queue. Its zero value is ready.
type workQueues struct {
	mu        sync.Mutex
	processes map[string][]func(item string)
}

// OnCommit calls enqueue with each item that a transaction has enqueued, once it has committed. enqueue must not block;
// an item that is lost with the process is found by its queue's periodic pass.
func (d *DB) OnCommit(queue string, enqueue func(item string)) {
	d.queues.mu.Lock()
	defer d.queues.mu.Unlock()
	if d.queues.processes == nil {
		d.queues.processes = map[string][]func(string){}
	}
	d.queues.processes[queue] = append(d.queues.processes[queue], enqueue)
}

func (q *workQueues) enqueue(queue string, items []string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, enqueue := range q.processes[queue] {
		for _, item := range items {
			enqueue(item)
		}
	}
}

// announce signals what follows a commit: who watches the tables that the transaction wrote, the subscribers of what it
// changed, and the queues of what it enqueued. A commit of unknown outcome may have happened: who is signalled reads
// again and sees.
func (d *DB) announce(o outcome, w *retryingTx) {
	if w == nil || o != committed && o != unknown {
		return
	}
	d.writes.announce(w.wrote) // first: who is signalled reads anew
	d.changes.Notify(w.changed...)
	for queue, items := range w.enqueued {
		d.queues.enqueue(queue, items)
	}
}
