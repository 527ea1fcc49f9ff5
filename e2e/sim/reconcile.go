package sim

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/e2e/sim/nodestore"
)

// activate wakes the node now and runs frequent passes for a while.
func (n *node) activate() {
	n.activeUntil = n.w.now + activeFor
	n.wake()
	n.planTick()
}

// wake schedules a pass.
func (n *node) wake() {
	if n.waking || !n.agentUp {
		return
	}
	n.waking = true
	life := n.life
	n.w.after(n.w.takes("pass", "", 0, second/50), n.i, "pass", func() {
		n.waking = false
		if n.agentUp && (n.life == life || !n.waking) {
			n.pass()
		}
	})
}

// planTick schedules the next periodic pass. Beside the product's loop there is none: it would come at another time.
func (n *node) planTick() {
	if n.w.script != nil {
		return
	}
	n.tickNo++
	mine, wait := n.tickNo, resync
	if n.w.now >= n.activeUntil && !n.w.healing {
		wait = n.w.between(span(n.w.cfg.Quiet)*9/10, span(n.w.cfg.Quiet)*11/10)
	}
	n.w.after(wait, n.i, "tick", func() {
		if mine == n.tickNo && n.agentUp {
			n.tick()
		}
	})
}

func (n *node) tick() {
	n.pass()
	n.up.tick()
	n.planTick()
}

// pass observes the machine, asks agent.Diff for actions and begins them.
func (n *node) pass() {
	if !n.agentUp {
		return
	}
	n.journalUnknown()
	now := n.now()
	desired, leases, observed := n.desired(), n.store.AgentLeases(), n.observe(now)
	n.closeMeasuredRuns(observed.Busy)
	if n.w.breaks(BreakHub) && n.up.no == 0 {
		leases = nil
	}
	actions := agent.Diff(desired, leases, observed, now)
	for _, id := range agent.Resumed(observed, n.store.Runs, actions) {
		n.store.UpdateRun(id, func(r *agent.Run) { r.StopRequested = false })
	}
	for _, a := range actions {
		n.begin(a)
	}
	n.probe(desired, observed)
	statuses := agent.Statuses(desired, leases, observed, now)
	if n.report == nil || !agent.EqualStatuses(statuses, n.report) {
		n.report = statuses
		n.activeUntil = max(n.activeUntil, n.w.now+2*minute)
		n.planTick()
		n.up.reportSoon()
	}
	n.planNextPass(agent.NextChange(desired, leases, observed, now), now)
}

// planNextPass schedules a pass for when time alone changes what has to be done.
func (n *node) planNextPass(at, now time.Time) {
	for _, until := range n.hold {
		if until.After(now) && (at.IsZero() || until.Before(at)) {
			at = until
		}
	}
	n.alarmNo++
	if at.IsZero() {
		return
	}
	mine := n.alarmNo
	n.w.after(span(at.Sub(now)), n.i, "alarm", func() {
		if mine == n.alarmNo {
			n.wake()
		}
	})
}

// journalUnknown adds containers and networks that the store does not know.
func (n *node) journalUnknown() {
	for _, c := range n.containers {
		if run, known := n.store.Runs[c.ID]; !known {
			n.store.JournalRun(c.UnknownRun(n.at(n.w.now)))
		} else if c.StartUnrecorded(run, n.busyWith(c.MemberID)) {
			n.recordStart(c)
		}
		if _, known := n.store.Members[c.MemberID]; !known {
			n.store.UpdateMember(c.MemberID, func(m *nodestore.Member) { m.InstanceID = c.InstanceID })
		}
	}
	for a := range n.networks {
		if _, known := n.store.Members[a.memberID]; !known {
			n.store.UpdateMember(a.memberID, func(*nodestore.Member) {})
		}
	}
}

// closeMeasuredRuns removes runs whose container is gone and whose usage is sealed.
func (n *node) closeMeasuredRuns(busy map[string]agent.Work) {
	for id, run := range n.store.Runs {
		if n.containerOf(id) == nil && !busy[run.MemberID].With(run.Service) && n.store.Meter.Measured(id) {
			n.store.CloseRun(id)
		}
	}
}

// probe notes which containers have become ready.
func (n *node) probe(desired agent.Desired, observed agent.Observed) {
	for i, c := range observed.Containers {
		if !c.ReadyAt.IsZero() || c.Status != agent.Running || n.containers[i].readyAt > n.w.now {
			continue
		}
		for _, signed := range desired.Workloads {
			m := observed.Members[signed.MemberID]
			if _, probed := signed.Effective(m).Probed(c, m, n.now()); probed {
				n.store.UpdateRun(c.ID, func(r *agent.Run) { r.ReadyAt = n.now() })
				n.w.oracle.becameReady(n.containers[i])
				n.wake()
			}
		}
	}
}

func (n *node) observe(now time.Time) agent.Observed {
	o := agent.Observed{
		Containers: make([]agent.Container, 0, len(n.containers)),
		Members:    make(map[string]agent.Member, len(n.store.Members)),
		Images:     n.images,
		Busy:       make(map[string]agent.Work, len(n.busy)),
	}
	times := n.at(n.w.now)
	for _, c := range n.containers {
		joined := c.Container(n.store.Runs[c.ID], times)
		joined.WatchedSince = n.watchedSince
		o.Containers = append(o.Containers, joined)
	}
	for _, a := range n.attachments() {
		o.Networks = append(o.Networks, n.store.Members[a.memberID].Network(a.service))
	}
	for id, m := range n.store.Members {
		o.Members[id] = m.Member
	}
	for id := range n.busy {
		o.Busy[id] = n.busyWith(id)
	}
	for held, until := range n.hold {
		if until.After(now) {
			b := o.Busy[held.memberID]
			b.Mark(held.service)
			o.Busy[held.memberID] = b
		}
	}
	return o
}

// attachments are the networks on the machine, in order.
func (n *node) attachments() []attachment {
	return slices.SortedFunc(maps.Keys(n.networks), func(a, b attachment) int {
		return cmp.Or(cmp.Compare(a.memberID, b.memberID), cmp.Compare(a.service, b.service))
	})
}

// busyWith returns the kinds of actions that run for a member.
func (n *node) busyWith(id string) (w agent.Work) {
	for _, t := range n.busy[id] {
		if t.image != "" {
			w.Pulling = append(w.Pulling, t.image)
		} else {
			w.Mark(t.service)
		}
	}
	slices.Sort(w.Pulling)
	return w
}
