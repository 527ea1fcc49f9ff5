package command

import (
	"context"
	"sync"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// turns lets through one after the other who would only undo one another: of many transactions over the same rows at once, the
// database lets one commit and has the others start afresh, again and again. What is right does not depend on it. Its zero value
// is ready; it holds a key only while somebody has its turn or waits for it.
type turns struct {
	mu    sync.Mutex
	queue map[string]*queue
}

type queue struct {
	place chan struct{}
	users int
}

// take waits for the turn of this key. leave ends it.
func (t *turns) take(ctx context.Context, key string) (leave func(), err error) {
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

func (t *turns) join(key string) *queue {
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

func (t *turns) quit(key string, q *queue) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if q.users--; q.users == 0 {
		delete(t.queue, key)
	}
}
