package reconcile

import (
	"maps"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/protocol"
)

// debounce is how long a change that is not urgent waits: the hub gets one report of a launch instead of one for each
// step.
const debounce = 250 * time.Millisecond

// publishConditions publishes the last report again, with the current conditions: the pass observed nothing.
func (r *Reconciler) publishConditions() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.replaceReport(r.report)
}

// publishInventory tells the subscribers that the accelerators, or the conditions of their drivers, have changed.
func (r *Reconciler) publishInventory() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.report.Conditions = r.currentConditions()
	r.notifySubscribers()
}

// publish makes report the current one.
func (r *Reconciler) publish(report agent.Report) {
	r.mu.Lock()
	defer r.mu.Unlock()
	report.Passes = r.report.Passes + 1
	r.replaceReport(report)
}

// replaceReport notifies the subscribers if the report says something new. The caller holds mu.
func (r *Reconciler) replaceReport(report agent.Report) {
	report.Conditions = r.currentConditions()
	before := r.report
	r.report = report
	sameConditions := slices.Equal(report.Conditions, before.Conditions)
	same := before.Passes > 0 && report.Epoch == before.Epoch && report.Generation == before.Generation &&
		agent.EqualStatuses(report.Workloads, before.Workloads) && sameConditions
	switch {
	case same:
	case before.Passes == 0 || !sameConditions || isUrgent(before.Workloads, report.Workloads):
		r.notifySubscribers()
	case r.debounced == nil:
		r.debounced = time.AfterFunc(debounce, func() {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.notifySubscribers()
		})
	}
}

// notifySubscribers also ends the debouncing. The caller holds mu.
func (r *Reconciler) notifySubscribers() {
	if r.debounced != nil {
		r.debounced.Stop()
		r.debounced = nil
	}
	r.subscribers.Send()
}

// isUrgent reports whether a member has reached the end of a change, or got a new reason or fallback. Progress on the
// way is not urgent.
func isUrgent(before, now []*protocol.WorkloadStatus) bool {
	earlier := make(map[string]*protocol.WorkloadStatus, len(before))
	for _, s := range before {
		earlier[s.GetMemberId()] = s
	}
	for _, s := range now {
		old := earlier[s.GetMemberId()]
		changing := s.GetStatus() == protocol.WorkloadStatus_PENDING || s.GetStatus() == protocol.WorkloadStatus_STARTING ||
			s.GetStatus() == protocol.WorkloadStatus_STOPPING
		if s.GetReason() != old.GetReason() || s.GetFallbackFromRevision() != old.GetFallbackFromRevision() ||
			!changing && (s.GetStatus() != old.GetStatus() || s.GetRevision() != old.GetRevision()) {
			return true
		}
	}
	return false
}

// currentConditions are the node's conditions, sorted. The caller holds mu.
func (r *Reconciler) currentConditions() []string {
	found := make(map[string]bool)
	for c := range r.conditions {
		found[c] = true
	}
	for _, c := range slices.Concat(r.machine.Host.Conditions(), r.machine.Network.Conditions(),
		r.machine.Accelerators.Conditions(), r.machine.Volumes.Conditions(), r.cfg.WeakIsolation) {
		found[c] = true
	}
	if owner, _ := r.cfg.Policy(); owner.ShareWeakIsolation && len(r.cfg.WeakIsolation) > 0 {
		found[protocol.ConditionWeakIsolationShared] = true
	}
	if len(r.store.Unverified()) > 0 {
		found["state_unverified"] = true
	}
	if r.clock.MachineIsWrong() {
		found["clock_untrusted"] = true
	}
	if r.store.Bundle().Expired(r.clock.Now()) {
		found[protocol.ConditionBundleExpired] = true
	}
	return slices.Sorted(maps.Keys(found))
}
