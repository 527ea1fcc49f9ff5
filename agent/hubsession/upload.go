package hubsession

import (
	"time"

	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// UsageWindow bounds the segments without acknowledgement. The hub posts segments that arrive together in one
	// transaction.
	UsageWindow = 16
	// DefaultUsageRetry is the pause after a hub could not post a segment.
	DefaultUsageRetry = 5 * time.Second
	// usageRefusedRetry is the pause after a hub refused a segment for good.
	usageRefusedRetry = 5 * time.Minute
)

// Upload decides which sealed segments a session sends. The hub acknowledges every segment once, in order.
type Upload struct {
	next     uint64
	inFlight int
	refused  protocol.Nack_Reason
}

// NewUpload starts after the newest segment that the hub has posted; the hub bills each segment once.
func NewUpload(posted uint64) Upload { return Upload{next: posted + 1} }

// Next is the number of the segment to send, if it is sealed; ok is false while none may be sent.
func (u *Upload) Next() (number uint64, ok bool) {
	return u.next, u.inFlight < UsageWindow && u.refused == 0
}

// Sent counts the next segment as sent.
func (u *Upload) Sent() {
	u.next++
	u.inFlight++
}

// Waiting reports whether an acknowledgement is due.
func (u *Upload) Waiting() bool { return u.inFlight > 0 }

// Acknowledged counts one acknowledgement; refused is the hub's reason, unspecified for a posted segment. The hub
// refuses the segments after a refused one, too. With the last acknowledgement Acknowledged returns the first reason:
// the session then ends (Broken) or the caller waits for UsageRetry and calls Restart.
func (u *Upload) Acknowledged(refused protocol.Nack_Reason) (stopped protocol.Nack_Reason) {
	u.inFlight--
	if u.refused == 0 {
		u.refused = refused
	}
	if u.inFlight > 0 {
		return 0
	}
	return u.refused
}

// Restart starts again after the newest posted segment.
func (u *Upload) Restart(posted uint64) { *u = NewUpload(posted) }

// Broken reports whether the hub has posted other segments of this incarnation. No retry changes that: the store takes
// a new incarnation, and the node dials with the usual pause, so that a hub that refuses everything is not flooded.
func Broken(refused protocol.Nack_Reason) bool { return refused == protocol.Nack_CHAIN_BROKEN }

// UsageRetry is the pause after a refusal; unavailable is the pause for a hub that cannot post at the moment.
func UsageRetry(refused protocol.Nack_Reason, unavailable time.Duration) time.Duration {
	if refused == protocol.Nack_UNAVAILABLE {
		return unavailable
	}
	return usageRefusedRetry
}
