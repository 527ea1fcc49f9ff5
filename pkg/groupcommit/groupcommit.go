// Package groupcommit commits the items of many callers together: those that arrive while one group is being committed
// form the next. It knows neither what an item is nor what a commit does, which may be a read, and it keeps no item
// after its commit.
package groupcommit

import (
	"context"
	"sync"
)

// Queue holds items until they are committed, one group at a time. A single item does not wait, and no goroutine runs
// while the queue is empty. The queue is unbounded: its callers bound how many items they put.
type Queue[T any] struct {
	split  func(waiting []T) (group, rest []T)
	commit func(ctx context.Context, group []T)

	mu      sync.Mutex
	waiting []T
	working bool
}

// New makes an empty queue. split chooses the next group from the waiting items, which are in the order of their
// arrival, after what the last split left. It may drop items, and takes or drops one at least. commit itself tells
// the caller of each item of its group, which is not empty.
func New[T any](split func(waiting []T) (group, rest []T), commit func(ctx context.Context, group []T)) *Queue[T] {
	return &Queue[T]{split: split, commit: commit}
}

// All is a split that puts everything that waits into one group.
func All[T any](waiting []T) (group, rest []T) { return waiting, nil }

// AtMost is a split that puts the first n of what waits into one group.
func AtMost[T any](n int) func(waiting []T) (group, rest []T) {
	return func(waiting []T) (group, rest []T) {
		n := min(len(waiting), n)
		return waiting[:n:n], waiting[n:]
	}
}

// Put adds an item and returns at once. The commit outlives ctx, whose values it gets.
func (q *Queue[T]) Put(ctx context.Context, item T) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.waiting = append(q.waiting, item)
	if !q.working {
		q.working = true
		go q.work(context.WithoutCancel(ctx))
	}
}

func (q *Queue[T]) work(ctx context.Context) {
	for group := q.next(); group != nil; group = q.next() {
		q.commit(ctx, group)
	}
}

// next returns the next group; nil when nothing waits and the worker ends.
func (q *Queue[T]) next() (group []T) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.waiting) > 0 {
		if group, q.waiting = q.split(q.waiting); len(group) > 0 {
			return group
		}
	}
	q.waiting, q.working = nil, false
	return nil
}
