// Package notify wakes those who wait for a change of something named. A wake-up carries no data and may be missed, as
// when another process made the change: a waiter checks from time to time without one.
package notify

import (
	"slices"
	"sync"
)

// maxSubscribers bounds how many wait at once in one Topics; Subscribe refuses one more, who polls instead. It is twice
// the connections that the hub's API accepts, so that a few orgs do not take it from the others.
const maxSubscribers = 16384

// Topics has subscribers for each topic. Its zero value is ready.
type Topics struct {
	mu          sync.Mutex
	subscribers map[string][]chan struct{}
	count       int
	closed      bool
}

// Subscribe returns a channel of capacity one that is signalled after each change of the topic, until cancel is called.
// The channel is nil when too many wait already, and after Close.
func (t *Topics) Subscribe(topic string) (changed <-chan struct{}, cancel func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed || t.count >= maxSubscribers {
		return nil, func() {}
	}
	if t.subscribers == nil {
		t.subscribers = map[string][]chan struct{}{}
	}
	c := make(chan struct{}, 1)
	t.subscribers[topic] = append(t.subscribers[topic], c)
	t.count++
	return c, sync.OnceFunc(func() { t.unsubscribe(topic, c) })
}

func (t *Topics) unsubscribe(topic string, c chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.count--
	t.subscribers[topic] = slices.DeleteFunc(t.subscribers[topic], func(other chan struct{}) bool { return other == c })
	if len(t.subscribers[topic]) == 0 {
		delete(t.subscribers, topic)
	}
}

// Notify signals the subscribers of the topics. Call it after the change can be read.
func (t *Topics) Notify(topics ...string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, topic := range topics {
		signal(t.subscribers[topic])
	}
}

// Subscribers counts the subscribers of all topics.
func (t *Topics) Subscribers() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.count
}

// Close signals all subscribers, for good: a process that stops keeps no one waiting.
func (t *Topics) Close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	for _, subscribers := range t.subscribers {
		signal(subscribers)
	}
}

// Closed reports whether Close was called.
func (t *Topics) Closed() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.closed
}

func signal(subscribers []chan struct{}) {
	for _, c := range subscribers {
		select {
		case c <- struct{}{}:
		default:
		}
	}
}
