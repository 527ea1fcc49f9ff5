// Package notify wakes goroutines. A wake-up carries no data: the receiver reads the current state itself, and signals
// that it has not received yet merge into one. The package keeps no history and never blocks a sender.
package notify

import "sync"

// Signal is a wake-up for one receiver, which reads the channel. Make it with NewSignal.
type Signal chan struct{}

// NewSignal returns a Signal without a pending wake-up.
func NewSignal() Signal { return make(Signal, 1) }

// Send wakes the receiver now, or at its next receive.
func (s Signal) Send() {
	select {
	case s <- struct{}{}:
	default:
	}
}

// Broadcast is a wake-up for any number of receivers. The zero value has none.
type Broadcast struct {
	mu      sync.Mutex
	signals []Signal
}

// Subscribe returns a channel that receives a wake-up after each later Send. A subscription lasts as long as the
// Broadcast.
func (b *Broadcast) Subscribe() <-chan struct{} {
	s := NewSignal()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.signals = append(b.signals, s)
	return s
}

// Send wakes every subscriber.
func (b *Broadcast) Send() {
	b.mu.Lock()
	defer b.mu.Unlock()
	sendAll(b.signals)
}
