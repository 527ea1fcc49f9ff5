package reconcile

import (
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/protocol"
)

// lull is how long news may wait that nobody waits for: mostly better news comes meanwhile, and the hub takes in one
// report of a launch instead of one for each step.
const lull = 250 * time.Millisecond

// publish keeps the report and tells the subscribers when it says something new. With fresh false, only conditions are
// new.
func (r *Reconciler) publish(report Report, fresh bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !fresh {
		report = r.report
	}
	if fresh {
		report.Passes = r.report.Passes + 1
	}
	report.Conditions = r.conditions()
	same := r.report.Passes > 0 && report.Epoch == r.report.Epoch && report.Generation == r.report.Generation &&
		equalStatuses(report.Workloads, r.report.Workloads) && slices.Equal(report.Conditions, r.report.Conditions)
	before := r.report
	r.report = report
	switch {
	case same:
	case before.Passes == 0 || !slices.Equal(report.Conditions, before.Conditions) || pressing(before.Workloads,
		report.Workloads):
		r.announce()
	case r.later == nil:
		r.later = time.AfterFunc(lull, func() {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.announce()
		})
	}
}

// announce signals the subscribers. The mutex is held.
func (r *Reconciler) announce() {
	if r.later != nil {
		r.later.Stop()
		r.later = nil
	}
	for _, c := range r.subs {
		select {
		case c <- struct{}{}:
		default:
		}
	}
}

// pressing reports whether somebody waits for the news: a member has come to where it was to come, or fares worse. That
// it is on its way is no such news.
func pressing(before, now []*protocol.WorkloadStatus) bool {
	was := make(map[string]*protocol.WorkloadStatus, len(before))
	for _, s := range before {
		was[s.GetMemberId()] = s
	}
	for _, s := range now {
		old := was[s.GetMemberId()]
		onItsWay := s.GetStatus() == agent.StatusPending || s.GetStatus() == agent.StatusStarting ||
			s.GetStatus() == agent.StatusStopping
		if s.GetReason() != old.GetReason() || s.GetFallbackFromRevision() != old.GetFallbackFromRevision() ||
			!onItsWay && (s.GetStatus() != old.GetStatus() || s.GetRevision() != old.GetRevision()) {
			return true
		}
	}
	return false
}

func equalStatuses(a, b []*protocol.WorkloadStatus) bool {
	return slices.EqualFunc(a, b, func(x, y *protocol.WorkloadStatus) bool { return proto.Equal(x, y) })
}
