package query

import (
	"cmp"
	"context"
	"time"
)

const (
	// pollInterval is how soon a waiting read polls for the first time without a signal. Each pause is twice as long as
	// the last one, up to pollBackoff times the first: only what another process changes comes without a signal.
	pollInterval = time.Second
	pollBackoff  = 8
)

// Watch says how long a read waits for a change.
type Watch struct {
	// After is the version that the caller has; a read of another version answers at once.
	After int64
	// Wait is the longest time to wait; 0 answers at once.
	Wait time.Duration
	// unsignalled says that the read has parts that change without a signal: it polls every pollInterval.
	unsignalled bool
}

// await reads until the resource has another version than the caller's, or the wait is over. Each read checks access
// again, the first one before anything waits: a caller without access learns nothing from the time an answer takes.
func await[T any](ctx context.Context, s *Service, id string, w Watch,
	read func() (value T, version int64, err error),
) (T, error) {
	if w.Wait <= 0 {
		value, _, err := read()
		return value, err
	}
	// Subscribed before the first read: a change in between is signalled.
	changes := s.DB.Changes()
	changed, cancel := changes.Subscribe(id)
	defer cancel()
	limit := time.NewTimer(w.Wait)
	defer limit.Stop()
	poll := cmp.Or(s.pollInterval, pollInterval)
	longest := poll * pollBackoff
	for last := changed == nil; ; last = last || changes.Closed() {
		value, version, err := read()
		if err != nil || last || version != w.After {
			return value, err
		}
		select {
		case <-ctx.Done():
			return value, ctx.Err()
		case <-changed:
		case <-time.After(poll):
			if !w.unsignalled {
				poll = min(2*poll, longest)
			}
		case <-limit.C:
			last = true
		}
	}
}
