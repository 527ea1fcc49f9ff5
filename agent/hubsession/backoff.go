package hubsession

import (
	"cmp"
	"errors"
	"time"
)

const (
	// DialRetryMin is the shortest pause between dials; each is spread over half of itself.
	DialRetryMin = 500 * time.Millisecond
	// DefaultDialRetryMax is the longest.
	DefaultDialRetryMax = 30 * time.Second
	// stableFactor: after a session that lasted this many times the next pause, the pauses start from DialRetryMin again.
	stableFactor = 10
	// GoAwaySpread is the time over which the nodes dial again after a hub has sent go-away to all of them.
	GoAwaySpread = 5 * time.Second
)

// Backoff computes the pauses between dials and spreads the nodes that lost the same hub. The zero value is a node that
// has not dialled yet.
type Backoff struct {
	next time.Duration
	// Longest bounds a pause; zero means DefaultDialRetryMax, and none is below DialRetryMin.
	Longest time.Duration
}

// Pause is the time until the next dial. The session before it was open for lasted (0 when there was none) and ended
// with err; random is a value in [0, 1).
func (b *Backoff) Pause(lasted time.Duration, err error, random float64) time.Duration {
	if b.next == 0 || lasted > stableFactor*b.next || errors.Is(err, ErrNewIncarnation) {
		b.next = DialRetryMin
	}
	d := Spread(b.next, random)
	b.next = min(2*b.next, max(cmp.Or(b.Longest, DefaultDialRetryMax), DialRetryMin))
	if errors.Is(err, ErrGoAway) {
		d += time.Duration(random * float64(GoAwaySpread))
	}
	return d
}

// Spread is d less up to half of itself.
func Spread(d time.Duration, random float64) time.Duration {
	return d/2 + time.Duration(random*float64(d/2))
}
