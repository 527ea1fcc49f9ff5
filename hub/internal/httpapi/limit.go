package httpapi

import (
	"math"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// maxBuckets bounds the callers that are remembered at once. When full, those whose bucket has filled up again go first (they
// lose nothing by it), then all others: for a moment somebody may get more than the rate, but memory stays bounded.
const maxBuckets = 10_000

// limiter gives each caller a bucket of requests.
type limiter struct {
	perSecond rate.Limit
	burst     int

	mu      sync.Mutex
	buckets map[string]*rate.Limiter
}

func newLimiter(perSecond float64, burst int) *limiter {
	return &limiter{perSecond: rate.Limit(perSecond), burst: burst, buckets: map[string]*rate.Limiter{}}
}

// take spends one request of the caller's, or says when the next one is there.
func (l *limiter) take(caller string, now time.Time) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	b, ok := l.buckets[caller]
	if !ok {
		if len(l.buckets) >= maxBuckets {
			l.forget(now)
		}
		b = rate.NewLimiter(l.perSecond, l.burst)
		l.buckets[caller] = b
	}
	if b.AllowN(now, 1) {
		return nil
	}
	wait := time.Duration(math.Ceil((1 - b.TokensAt(now)) / float64(l.perSecond) * float64(time.Second)))
	return fault.New(fault.RateLimited, "rate_limited", "Too many requests; wait as long as Retry-After says.", nil).After(wait)
}

func (l *limiter) forget(now time.Time) {
	for caller, b := range l.buckets {
		if b.TokensAt(now) >= float64(l.burst) {
			delete(l.buckets, caller)
		}
	}
	if len(l.buckets) >= maxBuckets {
		clear(l.buckets)
	}
}
