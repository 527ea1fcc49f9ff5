// Package keylock serializes or limits work on the same key inside one process. It does not know what a key names.
package keylock

import (
	"context"
	"sync"
)

// Map has one lock for each key in use. Its zero value is ready; it keeps no key that is neither locked nor waited for.
// Waiters of a key get its lock in the order of their calls.
type Map struct {
	// Holders is how many may hold the lock of one key at the same time; zero means one.
	Holders int

	mu    sync.Mutex
	locks map[string]*lock
}

type lock struct {
	// held has a slot for each holder.
	held  chan struct{}
	users int
}

// Lock waits for the key's lock. unlock releases it; call it once. When ctx ends first, Lock returns the error of ctx
// and does not hold the lock.
func (m *Map) Lock(ctx context.Context, key string) (unlock func(), err error) {
	l := m.join(key)
	select {
	case l.held <- struct{}{}:
		return func() { m.unlock(key, l) }, nil
	case <-ctx.Done():
		m.leave(key, l)
		return nil, ctx.Err()
	}
}

// TryLock is Lock that does not wait: free reports whether it holds the lock.
func (m *Map) TryLock(key string) (unlock func(), free bool) {
	l := m.join(key)
	select {
	case l.held <- struct{}{}:
		return func() { m.unlock(key, l) }, true
	default:
		m.leave(key, l)
		return nil, false
	}
}

func (m *Map) unlock(key string, l *lock) {
	<-l.held
	m.leave(key, l)
}

// Len returns how many keys are locked or waited for.
func (m *Map) Len() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.locks)
}

func (m *Map) join(key string) *lock {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.locks[key]
	if l == nil {
		if m.locks == nil {
			m.locks = map[string]*lock{}
		}
		l = &lock{held: make(chan struct{}, max(m.Holders, 1))}
		m.locks[key] = l
	}
	l.users++
	return l
}

func (m *Map) leave(key string, l *lock) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if l.users--; l.users == 0 {
		delete(m.locks, key)
	}
}
