package event

import (
	"slices"
	"sync"
)

// maxWaiting bounds who may wait for changes at once in this process.
const maxWaiting = 4096

// Wakes wakes those who wait for a change of a resource. A wake-up carries nothing and may be missed, as when another process of
// the hub made the change: whoever waits looks now and then without one.
type Wakes struct {
	mu      sync.Mutex
	waiting map[string][]chan struct{}
	count   int
	closed  bool
}

// On has the channel signalled when the resource may have changed, until off is called. It is nil when too many wait already, or
// nobody is to wait any more.
func (w *Wakes) On(id string) (wake <-chan struct{}, off func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed || w.count >= maxWaiting {
		return nil, func() {}
	}
	if w.waiting == nil {
		w.waiting = map[string][]chan struct{}{}
	}
	c := make(chan struct{}, 1)
	w.waiting[id] = append(w.waiting[id], c)
	w.count++
	return c, sync.OnceFunc(func() { w.off(id, c) })
}

func (w *Wakes) off(id string, c chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.count--
	w.waiting[id] = slices.DeleteFunc(w.waiting[id], func(other chan struct{}) bool { return other == c })
	if len(w.waiting[id]) == 0 {
		delete(w.waiting, id)
	}
}

// Waiting counts those who wait.
func (w *Wakes) Waiting() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.count
}

// Changed wakes those who wait for one of the resources. Call it after the commit.
func (w *Wakes) Changed(ids ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, id := range ids {
		wake(w.waiting[id])
	}
}

// Close wakes all, for good: a hub that stops keeps nobody waiting.
func (w *Wakes) Close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	for _, waiting := range w.waiting {
		wake(waiting)
	}
}

// Closed reports whether nobody is to wait any more.
func (w *Wakes) Closed() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.closed
}

func wake(waiting []chan struct{}) {
	for _, c := range waiting {
		select {
		case c <- struct{}{}:
		default:
		}
	}
}
