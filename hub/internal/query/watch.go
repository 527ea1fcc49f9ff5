package query

import (
	"cmp"
	"context"
	"time"
)

// pollInterval is how soon a waiting read polls again without a signal: another process may have made the change.
const pollInterval = time.Second

// Watch says how long a read waits for a change.
type Watch struct {
	// After is the version that the caller has; a read of another version answers at once.
	After int64
	// Wait is the longest time to wait; 0 answers at once.
	Wait time.Duration
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
	for last := changed == nil; ; last = last || changes.Closed() {
		value, version, err := read()
		if err != nil || last || version != w.After {
			return value, err
		}
		select {
		case <-ctx.Done():
			return value, ctx.Err()
		case <-changed:
		case <-time.After(cmp.Or(s.pollInterval, pollInterval)):
		case <-limit.C:
			last = true
		}
	}
}
