package sim

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/e2e/sim/nodestore"
	"github.com/gpuaas/gpuaas/protocol"
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
	n.w.after(n.w.upTo(second/50), n.i, "pass", func() {
		n.waking = false
		if n.agentUp && (n.life == life || !n.waking) {
			n.pass()
		}
	})
}

// planTick schedules the next periodic pass.
func (n *node) planTick() {
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
	n.closeMeasuredRuns()
	n.probe()
	now := n.now()
	desired, leases, observed := n.store.Desired(), n.store.AgentLeases(), n.observe(now)
	if n.w.breaks(BreakHub) && n.up.no == 0 {
		leases = nil
	}
	for _, a := range agent.Diff(desired, leases, observed, now) {
		n.begin(a)
	}
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
		if run, known := n.store.Runs[c.id]; !known {
			n.store.JournalRun(nodestore.Run{
				ID: c.id, MemberID: c.memberID, InstanceID: c.instanceID, Service: c.service, Revision: c.revision,
				StartedAt: n.happened(c.startedRTC, time.Time{}),
			})
		} else if run.StartedAt.IsZero() && c.status == agent.Running {
			n.store.UpdateRun(c.id, func(r *nodestore.Run) { r.StartedAt = n.happened(c.startedRTC, r.OpenedAt) })
		}
		if _, known := n.store.Members[c.memberID]; !known {
			n.store.UpdateMember(c.memberID, func(m *nodestore.Member) { m.InstanceID = c.instanceID })
		}
	}
	for id := range n.networks {
		if _, known := n.store.Members[id]; !known {
			n.store.UpdateMember(id, func(*nodestore.Member) {})
		}
	}
}

// closeMeasuredRuns removes runs whose container is gone and whose usage is sealed.
func (n *node) closeMeasuredRuns() {
	for id, run := range n.store.Runs {
		b := n.busy[run.MemberID]
		if n.containerOf(id) == nil && (b == nil || b.other == 0) && n.store.Meter.Measured(id) {
			n.store.CloseRun(id)
		}
	}
}

// probe notes which containers have become ready.
func (n *node) probe() {
	for _, c := range n.containers {
		if c.status == agent.Running && c.readyAt <= n.w.now && n.store.Runs[c.id].ReadyAt.IsZero() {
			n.store.UpdateRun(c.id, func(r *nodestore.Run) { r.ReadyAt = n.now() })
		}
	}
}

func (n *node) observe(now time.Time) agent.Observed {
	o := agent.Observed{
		Members: make(map[string]agent.Member, len(n.store.Members)), Images: n.images,
		Busy: map[string]agent.Work{},
	}
	for _, c := range n.containers {
		run := n.store.Runs[c.id]
		x := agent.Container{
			ID: c.id, MemberID: c.memberID, InstanceID: c.instanceID, Service: c.service, Revision: c.revision,
			SpecDigest: c.specDigest,
			Status:     c.status, StartedAt: run.StartedAt, ExitedAt: run.ExitedAt, ExitCode: run.ExitCode,
			ExitRecorded: run.ExitRecorded, AcceleratorIDs: c.accelerators, ReadyAt: run.ReadyAt,
		}
		if x.StartedAt.IsZero() {
			x.StartedAt = n.happened(c.startedRTC, run.OpenedAt)
		}
		o.Containers = append(o.Containers, x)
	}
	for _, id := range slices.Sorted(maps.Keys(n.networks)) {
		net := agent.Network{MemberID: id}
		if m := n.store.Members[id]; m.NetworkReady {
			net.Revision = m.NetworkRevision
		}
		o.Networks = append(o.Networks, net)
	}
	for id, m := range n.store.Members {
		o.Members[id] = m.Member
	}
	for id, b := range n.busy {
		o.Busy[id] = agent.Work{Pulling: b.pulling > 0, Other: b.other > 0}
	}
	for id, until := range n.hold {
		if until.After(now) {
			b := o.Busy[id]
			b.Other = true
			o.Busy[id] = b
		}
	}
	return o
}

// begin executes an action beside the others; its member counts as busy meanwhile.
func (n *node) begin(a agent.Action) {
	id := agent.MemberOf(a)
	switch a := a.(type) {
	case agent.ConfirmRevision:
		n.do(id, false, second/100, "settle", func() {
			n.store.UpdateMember(id, func(m *nodestore.Member) { m.ConfirmedRevision = a.Revision })
		})
	case agent.FallBack:
		n.do(id, false, second/100, "fall back", func() {
			n.store.UpdateMember(id, func(m *nodestore.Member) {
				m.FellBackFrom, m.FallbackReason, m.FallbackDetail = a.Revision, a.Reason, a.Detail
			})
		})
	case agent.CancelPull:
		return // a pull takes seconds here
	case agent.StopContainer:
		n.w.oracle.stopping(n, a)
		n.store.UpdateRun(a.ContainerID, func(r *nodestore.Run) { r.StopRequested = true })
		// The signal is sent: the process ends whether or not the agent lives to see it.
		n.w.after(n.w.between(second/10, span(min(a.Grace, 8*time.Second))+second/5), n.i, "stopped", func() {
			if c := n.containerOf(a.ContainerID); c != nil {
				n.end(c, true, 143)
			}
		})
		n.do(id, false, 9*second, "stop", func() {})
	case agent.RecordExit:
		n.do(id, false, second/100, "record", func() { n.recordExit(a) })
	case agent.RemoveContainer:
		n.do(id, false, n.w.between(second/20, second), "remove", func() {
			n.remove(a.ContainerID)
			n.store.CloseRun(a.ContainerID)
		})
	case agent.RemoveNetwork:
		n.do(id, false, n.w.between(second/20, second/2), "network gone", func() {
			delete(n.networks, id)
			n.store.UpdateMember(id, func(m *nodestore.Member) { m.NetworkRevision, m.NetworkReady = 0, false })
		})
	case agent.RetireMember:
		n.do(id, false, n.w.between(second/20, second/2), "retire", func() { n.retire(id) })
	case agent.DeliverConfig: // the simulated apps take no config
	case agent.FetchPart:
		n.do(id, false, n.w.between(second/50, second), "fetch", func() { n.up.fetch(a) })
	case agent.PullImage:
		n.do(id, true, n.w.between(second, 20*second), "pull", func() { n.pull(a) })
	case agent.SetupNetwork:
		n.store.UpdateMember(id, func(m *nodestore.Member) { m.NetworkRevision, m.NetworkReady = a.Revision, false })
		n.networks[id] = true
		n.do(id, false, n.w.between(second/20, second/3), "network", func() {
			if n.networks[id] {
				n.store.UpdateMember(id, func(m *nodestore.Member) { m.NetworkReady = true })
			}
			for _, start := range a.Start {
				n.startContainer(start)
			}
		})
	case agent.StartContainer:
		n.startContainer(a)
	}
}

// do ends an action after a while, if the agent that began it still lives.
func (n *node) do(id string, pulling bool, takes instant, kind string, end func()) {
	b := n.busy[id]
	if b == nil {
		b = &work{}
		n.busy[id] = b
	}
	count := &b.other
	if pulling {
		count = &b.pulling
	}
	*count++
	life := n.life
	n.w.after(takes, n.i, kind, func() {
		if n.life != life {
			return
		}
		end()
		if *count--; b.pulling == 0 && b.other == 0 {
			delete(n.busy, id)
		}
		n.wake()
	})
}

// startContainer makes the run durable, then the container, then notes when it came up. A crash may fall between any
// two.
func (n *node) startContainer(a agent.StartContainer) {
	n.runNo++
	id := fmt.Sprintf("%s.%d", a.MemberID, n.runNo)
	if !n.store.OpenRunIfDesired(nodestore.Run{
		ID: id, MemberID: a.MemberID, InstanceID: a.Workload.InstanceID, Service: a.Service.Name, Revision: a.Revision,
		LeaseNo: a.LeaseNo, OpenedAt: n.now(),
	}) {
		return
	}
	resources := a.Service.Spec.GetResources()
	c := &container{
		id: id, memberID: a.MemberID, instanceID: a.Workload.InstanceID, service: a.Service.Name, revision: a.Revision,
		specDigest: a.Service.SpecDigest, status: agent.Created, accelerators: a.Service.AcceleratorIDs,
		cpuMillis: int64(resources.GetCpuMillis()), memoryBytes: int64(resources.GetMemoryBytes()),
	}
	made, up := n.w.between(second/100, second/10), n.w.between(second/10, second)
	goesOn, broken := n.w.chance(0.5), !n.w.healing && n.w.chance(0.01)
	life, boot := n.life, n.bootID
	n.w.after(made, n.i, "container", func() {
		if n.bootID == boot && n.powered && n.life == life {
			n.containers = append(n.containers, c)
		}
	})
	n.w.after(up, n.i, "up", func() {
		// The shim does what it was asked, or the daemon died before it was.
		if !broken && n.bootID == boot && n.powered && n.containerOf(id) == c && (n.life == life || goesOn) {
			n.start(c)
		}
	})
	n.do(a.MemberID, false, up+n.w.between(1, second/10), "start", func() {
		if broken {
			n.remove(id)
			n.store.CloseRun(id)
			n.failed(a.MemberID, a.Revision, protocol.WorkloadStatus_INTERNAL, false, 0)
			return
		}
		n.store.UpdateRun(id, func(r *nodestore.Run) { r.StartedAt = n.happened(c.startedRTC, r.OpenedAt) })
	})
}

func (n *node) failed(id string, revision uint64, reason protocol.WorkloadStatus_Reason, permanent bool,
	ran time.Duration,
) {
	n.store.UpdateMember(id, func(m *nodestore.Member) {
		m.Member = m.Failed(revision, reason, reason.Text(), permanent, ran, n.now())
	})
}

func (n *node) pull(a agent.PullImage) {
	switch {
	case n.up.no == 0:
		n.hold[a.MemberID] = n.now().Add(agent.ReleaseRetry)
	case !n.w.healing && n.w.chance(0.02):
		n.failed(a.MemberID, a.Revision, protocol.WorkloadStatus_IMAGE_PULL_FAILED, false, 0)
	default:
		n.images[a.Image] = true
	}
}

func (n *node) retire(id string) {
	n.sample(n.w.now)
	if err := n.store.Retire(id, n.now()); err != nil {
		n.w.fail(5, "retire %s: %v", id, err)
	}
	n.up.send()
}

// recordExit makes exit and usage durable, in this order.
func (n *node) recordExit(a agent.RecordExit) {
	n.sample(n.w.now)
	c := n.containerOf(a.ContainerID)
	if c == nil || c.status != agent.Exited || !n.store.Meter.Measured(c.id) {
		return
	}
	run, exited := n.store.Runs[c.id], n.happened(c.exitedRTC, n.store.Runs[c.id].StartedAt)
	n.store.UpdateMember(a.MemberID, func(m *nodestore.Member) {
		m.ExitedAt, m.ExitCode = exited, c.exitCode
		if !a.Unasked || run.StopRequested {
			return
		}
		m.Restarts++
		if c.exitedRTC.IsZero() {
			return
		}
		m.Member = m.Failed(a.Revision, protocol.WorkloadStatus_CRASH_LOOP, "exited", false, exited.Sub(run.StartedAt),
			n.now())
	})
	n.store.UpdateRun(c.id, func(r *nodestore.Run) { r.ExitRecorded, r.ExitedAt, r.ExitCode = true, exited, c.exitCode })
}

// catchUp takes the last sample that was due, before anything else happens at the node.
func (n *node) catchUp() {
	if !n.agentUp {
		return
	}
	if due := (n.w.now-n.phase)/sampling*sampling + n.phase; due > n.lastSample {
		n.sample(due)
	}
}

// sample passes the containers to the meter, as they have been since the last event at the node.
func (n *node) sample(t instant) {
	n.lastSample = t
	r, last := n.reading(t), n.store.Stamp
	o := meter.Observation{At: n.clock.At(r), CutEvery: meter.DefaultCutEvery}
	for _, c := range n.containers {
		journal := n.store.Runs[c.id]
		run := meter.Run{
			RunID: c.id, MemberID: c.memberID, Revision: c.revision, LeaseNo: n.store.Leases[c.memberID].GetLeaseNo(),
			StartedAt: journal.StartedAt, ExitedAt: n.clock.Exited(c.exitedRTC, last, r), Up: c.status == agent.Running,
		}
		if run.StartedAt.IsZero() {
			run.StartedAt = n.clock.FromMachineTime(c.startedRTC, journal.OpenedAt, last, r)
		}
		if c.status == agent.Created {
			run.StartedAt, run.ExitedAt = time.Time{}, time.Time{}
		}
		if run.Up {
			run.CPUMicros, run.MemoryBytes, run.Sampled = c.cpuMicros(t), c.memoryBytes, true
		}
		o.Runs = append(o.Runs, run)
	}
	before := n.store.Chain.Number
	if err := n.store.SaveSample(o, n.clock.Stamp(r)); err != nil {
		n.w.fail(5, "sample of %s: %v", n.id, err)
	}
	if n.store.Chain.Number != before {
		n.w.trace("sealed", n.i, int64(n.store.Chain.Number), "")
		n.up.send()
	}
}
