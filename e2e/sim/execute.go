package sim

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/e2e/sim/nodestore"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// task is a running action: the pull of an image, or another one, of a service or of the whole member.
type task struct {
	image, service string
	ended          bool
}

// attachment is the network of a member's service; heldWork may be done again after a pause.
type (
	attachment struct{ memberID, service string }
	heldWork   struct{ memberID, service string }
)

// begin executes an action beside the others; its member counts as busy meanwhile.
func (n *node) begin(a agent.Action) {
	id := agent.MemberOf(a)
	switch a := a.(type) {
	case agent.ConfirmRevision:
		n.record(a, "confirm", func() { n.updateMember(id, a.Record) })
	case agent.FallBack:
		n.w.oracle.fallingBack(n, a)
		n.record(a, "fall back", func() { n.updateMember(id, a.Record) })
	case agent.CancelPull:
		n.cancelPulls(id)
	case agent.StopContainer:
		n.stop(a)
	case agent.RecordExit:
		n.record(a, "record exit", func() { n.recordExit(a) })
	case agent.RemoveContainer:
		takes := n.change(id, "remove", second/20, second, func() { n.remove(a.ContainerID) })
		n.do(a, takes, "removed", func() error { n.store.CloseRun(a.ContainerID); return nil })
	case agent.RemoveNetwork:
		takes := n.change(id, "remove network", second/20, second/2, func() {
			delete(n.networks, attachment{id, a.Attachment()})
		})
		n.do(a, takes, "network removed", func() error { n.updateMember(id, a.Record); return nil })
	case agent.RetireMember:
		n.do(a, n.w.takes("retire", id, second/20, second/2), "retire", func() error { return n.retire(id) })
	case agent.DeliverConfig, agent.DeliverSecrets: // the simulated apps take neither
	case agent.FetchPart:
		n.fetch(a)
	case agent.PullImage:
		n.pull(a)
	case agent.SetupNetwork:
		n.updateMember(id, a.RecordIntent)
		for _, service := range a.Services {
			n.networks[attachment{id, a.Attachment(service)}] = true
		}
		takes := n.w.takes("network", id, second/20, second/3)
		n.later(takes, "network", func() { n.updateMember(id, a.Record) })
		n.launch(a, takes)
	case agent.PublishPorts:
		n.updateMember(id, a.RecordIntent)
		n.do(a, n.w.takes("publish", id, second/100, second/10), "publish", func() error {
			n.updateMember(id, a.Record)
			return nil
		})
	case agent.StartContainer:
		end, err := n.startContainer(a, 0)
		n.do(a, end, "start", func() error { return err })
	}
}

func (n *node) updateMember(id string, change func(*agent.Member)) {
	n.store.UpdateMember(id, func(m *nodestore.Member) { change(&m.Member) })
}

// do ends an action after a while, if the agent that began it still lives and has not cancelled it.
func (n *node) do(a agent.Action, takes instant, kind string, end func() error) {
	id := agent.MemberOf(a)
	pull, _ := a.(agent.PullImage)
	t := &task{image: pull.Image, service: agent.ServiceOf(a)}
	n.busy[id] = append(n.busy[id], t)
	n.later(takes, kind, func() {
		if t.ended {
			return
		}
		if err := end(); err != nil {
			n.failed(a, err)
		}
		n.finish(id, t)
	})
}

// later does something unless the agent's process ends first.
func (n *node) later(takes instant, kind string, do func()) {
	life := n.life
	n.w.after(takes, n.i, kind, func() {
		if n.life == life {
			do()
		}
	})
}

// change changes the machine after a while. It returns when the agent hears of that, which may come too late for it.
func (n *node) change(id, kind string, from, to instant, change func()) instant {
	takes := n.w.takes(kind, id, from, to)
	n.later(takes, kind, change)
	return takes + n.w.takes("answer", id, 0, second/100)
}

// record executes an action that changes the store only.
func (n *node) record(a agent.Action, kind string, record func()) {
	n.do(a, n.w.takes("record", agent.MemberOf(a), 0, second/50), kind, func() error { record(); return nil })
}

func (n *node) finish(id string, t *task) {
	t.ended = true
	if left := slices.DeleteFunc(n.busy[id], func(o *task) bool { return o == t }); len(left) > 0 {
		n.busy[id] = left
	} else {
		delete(n.busy, id)
	}
	n.wake()
}

func (n *node) cancelPulls(id string) {
	for _, t := range slices.Clone(n.busy[id]) {
		if t.image != "" {
			n.finish(id, t)
		}
	}
}

// failed stores why an action failed.
func (n *node) failed(a agent.Action, err error) {
	id := agent.MemberOf(a)
	if pause := agent.PauseAfter(a, err); pause > 0 {
		n.hold[heldWork{id, agent.ServiceOf(a)}] = n.now().Add(pause)
		return
	}
	n.updateMember(id, func(m *agent.Member) { *m = m.FailedBy(a, err, n.now()) })
}

// stop sends the signal: the process ends whether or not the agent lives to see it.
func (n *node) stop(a agent.StopContainer) {
	n.w.oracle.stopping(n, a)
	n.store.UpdateRun(a.ContainerID, a.RecordIntent)
	takes := n.w.takes("stop", a.MemberID, second/10, span(min(a.Grace, 8*time.Second))+second/5)
	n.w.after(takes, n.i, "stopped", func() {
		if c := n.containerOf(a.ContainerID); c != nil {
			n.end(c, true, 143)
		}
	})
	n.do(a, takes+n.w.takes("answer", a.MemberID, 0, second/100), "stop", func() error { return nil })
}

// launch starts containers, which run once their networks are complete. One that fails is a failed try of its service.
func (n *node) launch(a agent.SetupNetwork, network instant) {
	ends := network
	failures := make([]error, len(a.Start))
	for i, start := range a.Start {
		var end instant
		end, failures[i] = n.startContainer(start, network)
		ends = max(ends, end)
	}
	n.do(a, ends, "launch", func() error {
		for i, err := range failures {
			if err != nil {
				n.failed(a.Start[i], err)
			}
		}
		return nil
	})
}

// startContainer makes the run durable, then the container, then notes when it came up. A crash may fall between any
// two. It returns when the start ends, and how.
func (n *node) startContainer(a agent.StartContainer, network instant) (ends instant, err error) {
	n.runs[a.MemberID]++
	id := fmt.Sprintf("%s.%d", a.MemberID, n.runs[a.MemberID])
	if !n.store.OpenRunIfDesired(agent.NewRun(a, id, n.now())) {
		return 0, nil
	}
	resources := a.Service.Spec.GetResources()
	c := &container{
		Listed: agent.Listed{
			ID: id, MemberID: a.MemberID, InstanceID: a.Workload.InstanceID, Service: a.Service.Name, Revision: a.Revision,
			Copy: a.Service.Copy, SpecDigest: a.Service.SpecDigest, AcceleratorIDs: a.Service.AcceleratorIDs,
			Status:    agent.Created,
			DependsOn: dependsOn(a.Service), Restart: a.Service.Spec.GetRestartPolicy(),
			StopGrace: time.Duration(a.Service.Spec.GetStopGraceSeconds()) * time.Second,
		},
		cpuMillis: int64(resources.GetCpuMillis()), memoryBytes: int64(resources.GetMemoryBytes()), org: a.Workload.OrgID,
		image: a.Service.Spec.GetImage(), began: n.w.now,
	}
	if n.beside(c, slices.Concat(n.containers, n.creating)) != nil && !n.w.breaks(BreakNeighbour) {
		n.store.CloseRun(id)
		return 0, errInUse()
	}
	n.creating = append(n.creating, c)
	made := n.w.takes("create", a.MemberID, second/100, second/10)
	up := max(made, network) + n.w.takes("start", a.MemberID, second/10, second)
	goesOn, err := n.w.script == nil && n.w.chance(0.5), n.w.fails("start", 0.01)
	life, boot := n.life, n.bootID
	n.w.after(made, n.i, "container", func() {
		if n.bootID == boot && n.powered && n.life == life {
			n.containers = append(n.containers, c)
			n.creating = slices.DeleteFunc(n.creating, func(x *container) bool { return x == c })
		}
	})
	if err != nil {
		gone := up + n.w.takes("remove", a.MemberID, second/20, second)
		n.later(gone, "remove", func() { n.remove(id) })
		ends = gone + n.w.takes("answer", a.MemberID, 0, second/100)
		n.later(ends, "removed", func() { n.store.CloseRun(id) })
		return ends, err
	}
	n.w.after(up, n.i, "up", func() {
		// The shim does what it was asked, or the daemon died before it was.
		if n.bootID == boot && n.powered && n.containerOf(id) == c && (n.life == life || goesOn) {
			n.start(c)
		}
	})
	ends = up + n.w.takes("answer", a.MemberID, 0, second/100)
	n.later(ends, "started", func() { n.recordStart(c) })
	return ends, nil
}

func dependsOn(s agent.Service) []string {
	var names []string
	for _, d := range s.DependsOn {
		names = append(names, d.Service)
	}
	return names
}

func (n *node) recordStart(c *container) {
	n.store.UpdateRun(c.ID, func(r *agent.Run) {
		r.StartedAt = n.at(n.w.now).FromMachineTime(c.StartedAt, r.OpenedAt)
	})
}

func (n *node) hubAway() bool {
	if n.w.script != nil {
		return n.w.script.HubAway()
	}
	return n.up.no == 0
}

// errHubAway is the failure of what needs a session.
func errHubAway() error {
	return fault.New(fault.Unavailable, agent.CodeHubAway, "There is no session.", nil)
}

func (n *node) pull(a agent.PullImage) {
	if n.hubAway() {
		n.do(a, 0, "pull", func() error { return fmt.Errorf("%w: %w", agent.ErrHubAway, errHubAway()) })
		return
	}
	err := n.w.fails("pull", 0.02)
	n.do(a, n.w.takes("pull", a.Image, second, 20*second), "pull", func() error {
		n.images[a.Image] = n.images[a.Image] || err == nil
		return err
	})
}

// fetch gets a document that did not come with its state.
func (n *node) fetch(a agent.FetchPart) {
	if n.hubAway() {
		n.do(a, 0, "fetch", errHubAway)
		return
	}
	n.do(a, n.w.takes("fetch", a.MemberID, second/50, second), "fetch", func() error {
		raw, err := n.up.part(a.SHA256)
		if err != nil {
			return err
		}
		return n.store.AcceptPart(raw)
	})
}

func (n *node) retire(id string) error {
	if n.store.Meter.Metering(id) {
		n.sample(n.w.now)
	}
	if err := n.store.Retire(id, n.now()); err != nil {
		n.w.fail(5, "retire %s: %v", id, err)
	}
	n.up.send()
	return nil
}

// recordExit makes usage and exit durable, in this order.
func (n *node) recordExit(a agent.RecordExit) {
	n.sample(n.w.now)
	c := n.containerOf(a.ContainerID)
	if c == nil || c.Status != agent.Exited || !n.store.Meter.Measured(c.ID) {
		return
	}
	run := n.store.Runs[c.ID]
	exited := n.at(n.w.now).FromMachineTime(c.ExitedAt, run.StartedAt)
	n.updateMember(a.MemberID, func(m *agent.Member) { a.RecordMember(m, run, c.Listed, exited, n.now()) })
	n.store.UpdateRun(c.ID, func(r *agent.Run) { a.Record(r, c.Listed, exited) })
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

// listed are the containers as the agent lists them.
func (n *node) listed() []agent.Listed {
	out := make([]agent.Listed, 0, len(n.containers))
	for _, c := range n.containers {
		out = append(out, c.Listed)
	}
	return out
}

// sample passes the containers to the meter, as they have been since the last event at the node.
func (n *node) sample(t instant) {
	n.lastSample = t
	times := n.at(t)
	o := meter.Observation{At: n.clock.At(times.now), CutEvery: meter.DefaultCutEvery}
	beside := agent.CopiesBeside(n.listed())
	for _, c := range n.containers {
		journal := n.store.Runs[c.ID]
		run := c.MeterRun(journal, journal, n.busyWith(c.MemberID), times)
		run.LeaseNo, run.Beside = n.store.Leases[c.MemberID].GetLeaseNo(), beside[c.ID]
		if c.Status == agent.Running {
			run.CPUMicros, run.MemoryBytes, run.Sampled = c.cpuMicros(t), c.memoryBytes, true
		}
		o.Runs = append(o.Runs, run)
	}
	before := n.store.Chain.Number
	if err := n.store.SaveSample(o, n.clock.Stamp(times.now)); err != nil {
		n.w.fail(5, "sample of %s: %v", n.id, err)
	}
	if n.store.Chain.Number != before {
		n.w.trace("sealed", n.i, int64(n.store.Chain.Number), "")
		n.up.sealed()
	}
}
