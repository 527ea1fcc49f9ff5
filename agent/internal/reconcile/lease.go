package reconcile

import (
	"math/big"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/protocol"
)

// endRunUnbilled is the end policy of a lease that lets its member go on without pay.
const endRunUnbilled = "run_unbilled"

// leases returns the newest lease of each member. Where some are set aside, each member may have one.
func (r *Reconciler) leases(members map[string]state.Member) agent.Leases {
	out := make(agent.Leases)
	if r.store.LeasesUnverified() {
		for id := range members {
			out[id] = agent.Lease{MemberID: id, Unverified: true}
		}
	}
	for id, l := range r.store.Leases() {
		spent := Spent(l, r.store.Consumed(id))
		out[id] = agent.Lease{
			MemberID:     id,
			No:           l.GetLeaseNo(),
			ExpiresAt:    l.GetExpiresAt().AsTime(),
			Exhausted:    spent.Sign() > 0 && spent.Cmp(big.NewInt(l.GetCapNanos())) >= 0,
			RunsUnbilled: r.cfg.AllowUnbilled && l.GetEndPolicy() == endRunUnbilled,
			Unverified:   r.store.ConsumedUnverified(id),
		}
	}
	return out
}

// Spent is what a member's usage costs at the lease's frozen prices, in billionths, rounded up.
func Spent(l *protocol.Lease, used map[string]int64) *big.Int {
	total := new(big.Int)
	for _, p := range l.GetPrices() {
		if p.GetPerQuantity() <= 0 {
			continue
		}
		cost := new(big.Int).Mul(big.NewInt(used[p.GetMeter()]), big.NewInt(p.GetPriceNanos()))
		quotient, rest := new(big.Int).QuoRem(cost, big.NewInt(p.GetPerQuantity()), new(big.Int))
		if rest.Sign() > 0 {
			quotient.Add(quotient, big.NewInt(1))
		}
		total.Add(total, quotient)
	}
	return total
}
