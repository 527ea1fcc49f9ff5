package uplink

import (
	"cmp"
	"errors"
	"math/rand/v2"
	"time"
)

const (
	// dialRetryMin is the shortest pause between dials; each is spread over half of itself.
	dialRetryMin = 500 * time.Millisecond
	// DefaultDialRetryMax is the longest.
	DefaultDialRetryMax = 30 * time.Second
	// stableFactor: a session that lasted this many times the next pause is well, and the pauses start from dialRetryMin
	// again. One that ends sooner each time is dialled ever more seldom.
	stableFactor = 10
	// goodbyeSpread is the time over which nodes come back that a hub has sent away all at once. It is not back sooner
	// anyway.
	goodbyeSpread = 5 * time.Second
)

var (
	// errRedial ends a session for a reason that the next one does away with.
	errRedial = errors.New("dialling again under a new incarnation")
	// errGoAway ends a session that the hub has ended.
	errGoAway = errors.New("the hub ends the session")
)

// backoff makes the pauses between dials, such that many nodes that lost the same hub do not come back at once. The
// zero value is a node that has not dialled yet.
type backoff struct {
	next time.Duration
	// most bounds a pause; zero means DefaultDialRetryMax, and none is below dialRetryMin.
	most time.Duration
}

// pause is the time until the next dial. The session before it was open for lasted (0 when there was none) and ended
// with err; random is a value in [0, 1).
func (b *backoff) pause(lasted time.Duration, err error, random float64) time.Duration {
	if b.next == 0 || lasted > stableFactor*b.next || errors.Is(err, errRedial) {
		b.next = dialRetryMin
	}
	d := spread(b.next, random)
	b.next = min(2*b.next, max(cmp.Or(b.most, DefaultDialRetryMax), dialRetryMin))
	if errors.Is(err, errGoAway) {
		d += time.Duration(random * float64(goodbyeSpread))
	}
	return d
}

// spread is d less up to half of itself.
func spread(d time.Duration, random float64) time.Duration {
	return d/2 + time.Duration(random*float64(d/2))
}

// jitter is spread by chance.
func jitter(d time.Duration) time.Duration {
	return spread(d, rand.Float64()) //nolint:gosec // not a secret
}
