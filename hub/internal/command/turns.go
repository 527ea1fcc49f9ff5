package command

import (
	"context"
	"sync"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Turns lets through one after the other who would only undo one another: of many transactions over the same rows at
// once, the database lets one commit and has the others start afresh, again and again. What is right does not depend on
// it. Its zero value is ready, and with a nil one nobody waits; it holds a key only while somebody has its turn or
// waits for it.
type Turns struct {
	mu    sync.Mutex
	queue map[string]*queue
}

type queue struct {
	place chan struct{}
	users int
}

// inTurn runs a command's transaction in the turn of its project: the instances of one share a wallet, the room of its
// allocations and the intent of their nodes.
func inTurn(ctx context.Context, t *Turns, d *db.DB, projectID string,
	fn func(tx db.Tx) (instanceResult, error),
) (instanceResult, error) {
	if t != nil {
		leave, err := t.take(ctx, projectID)
		if err != nil {
			return instanceResult{}, err
		}
		defer leave()
	}
	return db.RunTx(ctx, d, fn)
}

// take waits for the turn of this key. leave ends it.
func (t *Turns) take(ctx context.Context, key string) (leave func(), err error) {
	q := t.join(key)
	select {
	case q.place <- struct{}{}:
		return func() {
			<-q.place
			t.quit(key, q)
		}, nil
	case <-ctx.Done():
		t.quit(key, q)
		return nil, fault.New(fault.Unavailable, "cancelled", "The request ended before it could be done.", ctx.Err())
	}
}

func (t *Turns) join(key string) *queue {
	t.mu.Lock()
	defer t.mu.Unlock()
	q := t.queue[key]
	if q == nil {
		q = &queue{place: make(chan struct{}, 1)}
		if t.queue == nil {
			t.queue = map[string]*queue{}
		}
		t.queue[key] = q
	}
	q.users++
	return q
}

func (t *Turns) quit(key string, q *queue) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if q.users--; q.users == 0 {
		delete(t.queue, key)
	}
}
