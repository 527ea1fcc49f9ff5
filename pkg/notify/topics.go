package notify

import (
	"slices"
	"sync"
)

// maxSubscribers bounds the subscribers of one Topics; beyond it Subscribe refuses, and the caller polls. It is twice
// the connections that the hub's API accepts, so that a few orgs do not take all of it.
const maxSubscribers = 16384

// Topics is a Broadcast for each topic, with subscriptions that end. Its zero value is ready. Changes by other
// processes are not signalled: a subscriber polls as well.
type Topics struct {
	mu          sync.Mutex
	subscribers map[string][]Signal
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
		t.subscribers = map[string][]Signal{}
	}
	c := NewSignal()
	t.subscribers[topic] = append(t.subscribers[topic], c)
	t.count++
	return c, sync.OnceFunc(func() { t.unsubscribe(topic, c) })
}

func (t *Topics) unsubscribe(topic string, c Signal) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.count--
	t.subscribers[topic] = slices.DeleteFunc(t.subscribers[topic], func(other Signal) bool { return other == c })
	if len(t.subscribers[topic]) == 0 {
		delete(t.subscribers, topic)
	}
}

// Notify signals the subscribers of the topics. Call it after the change can be read.
func (t *Topics) Notify(topics ...string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, topic := range topics {
		sendAll(t.subscribers[topic])
	}
}

// Subscribers counts the subscribers of all topics.
func (t *Topics) Subscribers() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.count
}

// Close signals all subscribers and refuses further ones, so that a process that stops keeps none waiting.
func (t *Topics) Close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	for _, subscribers := range t.subscribers {
		sendAll(subscribers)
	}
}

// Closed reports whether Close was called.
func (t *Topics) Closed() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.closed
}

func sendAll(subscribers []Signal) {
	for _, s := range subscribers {
		s.Send()
	}
}
