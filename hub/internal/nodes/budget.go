package nodes

import (
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// How much one node may make the hub write; what exceeds it is not recorded, and does not affect other nodes. The rest
// of a report has no budget: its events are steps of operations that tenants requested.
const (
	// refusalsBurst and refusalsAnHour bound the recorded refusals of documents, each with an event and an audit row.
	refusalsBurst, refusalsAnHour = 60, 60
	// bumpsBurst and bumpsAnHour bound the generations that are published because a node refused one.
	bumpsBurst, bumpsAnHour = 30, 60
	// incarnationsBurst and incarnationsAnHour bound the incarnations of a node: a hello with a further one is refused.
	incarnationsBurst, incarnationsAnHour = 60, 60
	// healthBurst and healthAnHour bound the changes of the health of accelerators that have events; the inventory has all
	// of them.
	healthBurst, healthAnHour = 128, 240
	// phasesBurst and phasesAnHour bound the events of phases that pulls of images have entered; all of them are shown.
	phasesBurst, phasesAnHour = 192, 360
	// budgetsKept is how long the budget of a silent node is kept; it is full by then.
	budgetsKept = 2 * time.Hour
)

// budget is what one node has left. It is kept in memory: a restart of the hub refills it.
type budget struct {
	refusals, generationBumps, incarnations, health, phases *rate.Limiter
	// incarnation is the one of the newest hello.
	incarnation string
	usedAt      time.Time
}

// budgets are those of the nodes that sent messages within budgetsKept.
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
			health:       rate.NewLimiter(perHour(healthAnHour), healthBurst),
			phases:       rate.NewLimiter(perHour(phasesAnHour), phasesBurst),
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

func (b *budgets) mayRecordHealth(nodeID string, now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.of(nodeID, now).health.AllowN(now, 1)
}

func (b *budgets) mayRecordPhase(nodeID string, now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.of(nodeID, now).phases.AllowN(now, 1)
}

// mayUseIncarnation reports whether the node may say hello with this incarnation.
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
