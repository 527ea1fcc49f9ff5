package worker

import "time"

// WithMembersTimeout bounds the calls of Members by another time.
func WithMembersTimeout(w *Worker, d time.Duration) *Worker {
	w.membersTimeout = d
	return w
}
