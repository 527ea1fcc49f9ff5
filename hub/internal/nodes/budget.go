package nodes

import (
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// What one node may make the hub write by itself; what is beyond it is not recorded, and no other node notices. A
// report has no budget: its events are the steps of operations that tenants asked for, however often a node changes its
// mind.
const (
	// refusalsBurst and refusalsAnHour bound the refused documents that are recorded, each perhaps with an event and an
	// audit row.
	refusalsBurst, refusalsAnHour = 60, 60
	// bumpsBurst and bumpsAnHour bound the generations that are made because a node refused one.
	bumpsBurst, bumpsAnHour = 30, 60
	// incarnationsBurst and incarnationsAnHour bound the names that a node gives its store: a hello with a further one is
	// not answered.
	incarnationsBurst, incarnationsAnHour = 60, 60
	// budgetsKept is when the budgets of a node that was silent are full again and forgotten.
	budgetsKept = 2 * time.Hour
)

// budget is what one node has left. It lives in memory: a hub that restarts begins anew.
type budget struct {
	refusals, generationBumps, incarnations *rate.Limiter
	// incarnation is the store's name in the newest hello.
	incarnation string
	usedAt      time.Time
}

// budgets of the nodes that spoke in the last hours.
type budgets struct {
	mu       sync.Mutex
	byNode   map[string]*budget
	prunedAt time.Time
}

func perHour(n int) rate.Limit { return rate.Limit(float64(n) / time.Hour.Seconds()) }

// of returns the node's budget. mu is held.
func (b *budgets) of(nodeID string, now time.Time) *budget {
	if b.byNode == nil {
		b.byNode = map[string]*budget{}
	}
	if now.Sub(b.prunedAt) > budgetsKept {
		for id, old := range b.byNode {
			if now.Sub(old.usedAt) > budgetsKept {
				delete(b.byNode, id)
			}
		}
		b.prunedAt = now
	}
	n := b.byNode[nodeID]
	if n == nil {
		n = &budget{
			refusals: rate.NewLimiter(perHour(refusalsAnHour), refusalsBurst),
			generationBumps: rate.NewLimiter(perHour(bumpsAnHour),
				bumpsBurst),
			incarnations: rate.NewLimiter(perHour(incarnationsAnHour), incarnationsBurst),
		}
		b.byNode[nodeID] = n
	}
	n.usedAt = now
	return n
}

func (b *budgets) mayRecordRefusal(nodeID string, now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.of(nodeID, now).refusals.AllowN(now, 1)
}

func (b *budgets) mayBumpGeneration(nodeID string, now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.of(nodeID, now).generationBumps.AllowN(now, 1)
}

// mayUseIncarnation reports whether the node may say hello under this name of its store.
func (b *budgets) mayUseIncarnation(nodeID, incarnation string, now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := b.of(nodeID, now)
	if n.incarnation == incarnation {
		return true
	}
	if !n.incarnations.AllowN(now, 1) {
		return false
	}
	n.incarnation = incarnation
	return true
}
