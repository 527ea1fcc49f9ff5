package event

import (
	"slices"
	"sync"
)

const (
	// maxWaiting bounds who may wait for changes at once in this process; one beyond it is answered at once, and so polls.
	// It is twice the connections that the API takes, and 32 orgs' places for watchers: a few orgs do not take it from the
	// others.
	maxWaiting = 16384
	// maxRemembered bounds the resources of which it is remembered when they changed last. When there are more, all are
	// forgotten: whoever asks then looks.
	maxRemembered = 4096
)

// Wakes wakes those who wait for a change of a resource. A wake-up carries nothing and may be missed, as when another
// process of the hub made the change: whoever waits looks now and then without one.
type Wakes struct {
	mu      sync.Mutex
	waiting map[string][]chan struct{}
	count   int
	closed  bool

	// moment counts changes. changed has the moments of the latest changes, all of them after the moment known.
	moment, known uint64
	changed       map[string]uint64
}

// Version changes whenever the resource may have changed in this process. Take it before looking: what is seen then is
// at least as new. It counts the changes of all resources: do not show it.
func (w *Wakes) Version(id string) uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.begin()
	return max(w.known, w.changed[id])
}

func (w *Wakes) begin() {
	if w.changed == nil {
		w.changed = map[string]uint64{}
	}
}

// On has the channel signalled when the resource may have changed, until off is called. It is nil when too many wait
// already, or nobody is to wait any more.
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
	w.begin()
	for _, id := range ids {
		if w.moment++; len(w.changed) >= maxRemembered {
			clear(w.changed)
			w.known = w.moment
		}
		w.changed[id] = w.moment
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
