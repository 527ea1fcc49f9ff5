package reconcile

import (
	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/state"
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
		lease := agent.NewLease(l, r.store.Consumed(id))
		lease.RunsUnbilled = r.cfg.AllowUnbilled && l.GetEndPolicy() == endRunUnbilled
		lease.Unverified = r.store.ConsumedUnverified(id)
		out[id] = lease
	}
	return out
}
