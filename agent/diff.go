package agent

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/protocol"
)

// Diff returns the next actions, sorted: releases first, so that an accelerator, port or address is observed free
// before it is used again. A member with a release acquires nothing in the same pass; a busy member gets no action.
func Diff(desired Desired, leases Leases, observed Observed, now time.Time) []Action {
	d := differ{desired: desired, leases: leases, observed: observed, now: now}
	d.index()
	for _, id := range d.memberIDs() {
		d.member(id)
	}
	slices.SortStableFunc(d.actions, func(a, b Action) int {
		return cmp.Or(cmp.Compare(a.order(), b.order()), cmp.Compare(a.memberID(), b.memberID()))
	})
	return d.actions
}

type differ struct {
	desired  Desired
	leases   Leases
	observed Observed
	now      time.Time

	// signed are the workloads as signed; workloads are those to run: the fallback where the node has fallen back.
	signed     map[string]Workload
	workloads  map[string]Workload
	missing    map[string]MissingPart
	containers map[string][]Container
	networks   map[string]Network
	// inUse are the accelerators of containers that exist, whatever their status.
	inUse   map[string]bool
	actions []Action
}

func (d *differ) index() {
	d.workloads = make(map[string]Workload, len(d.desired.Workloads))
	d.signed = make(map[string]Workload, len(d.desired.Workloads))
	for _, w := range d.desired.Workloads {
		d.signed[w.MemberID] = w
		d.workloads[w.MemberID] = w.Effective(d.observed.Members[w.MemberID])
	}
	d.missing = make(map[string]MissingPart, len(d.desired.Missing))
	for _, p := range d.desired.Missing {
		d.missing[p.MemberID] = p
	}
	d.containers = make(map[string][]Container)
	d.inUse = make(map[string]bool)
	for _, c := range d.observed.Containers {
		d.containers[c.MemberID] = append(d.containers[c.MemberID], c)
		for _, id := range c.AcceleratorIDs {
			d.inUse[id] = true
		}
	}
	for _, cs := range d.containers {
		// Oldest first: of two copies the one that serves already stays.
		slices.SortFunc(cs, func(a, b Container) int {
			return cmp.Or(a.StartedAt.Compare(b.StartedAt), cmp.Compare(a.ID, b.ID))
		})
	}
	d.networks = make(map[string]Network, len(d.observed.Networks))
	for _, n := range d.observed.Networks {
		d.networks[n.MemberID] = n
	}
}

// memberIDs are all known members, sorted.
func (d *differ) memberIDs() []string {
	ids := make(map[string]bool)
	addKeys(ids, d.workloads)
	addKeys(ids, d.missing)
	addKeys(ids, d.containers)
	addKeys(ids, d.networks)
	addKeys(ids, d.observed.Members)
	addKeys(ids, d.observed.Busy)
	return slices.Sorted(maps.Keys(ids))
}

func addKeys[V any](ids map[string]bool, of map[string]V) {
	for id := range of {
		ids[id] = true
	}
}

func (d *differ) member(id string) {
	w, wanted := d.workloads[id]
	part, waits := d.missing[id]
	why := d.blockedBy(w, wanted)
	if busy := d.observed.Busy[id]; busy.Other {
		return
	} else if busy.Pulling {
		if why != "" && why != unverified && !d.inDoubt(id) {
			d.add(CancelPull{MemberID: id})
		}
		return
	}
	if d.inDoubt(id) || why == unverified {
		// The signed state is unknown: running containers go on, their exits are recorded, and nothing starts.
		if l := d.leases[id]; l.No > 0 && !l.Unverified && !l.Covers(d.now) {
			d.releaseAll(id, w, "lease_ended")
		} else {
			d.recordExits(id, false)
		}
		if waits {
			d.add(FetchPart(part))
		}
		return
	}
	if decision := d.revisionDecision(d.signed[id]); decision != nil {
		d.add(decision)
		return
	}
	before := len(d.actions)
	if why == refused && d.keepsRunning(w) {
		d.releaseOutdated(id, w)
		return
	}
	if why != "" {
		d.releaseAll(id, w, why)
		if len(d.actions) == before && !wanted {
			d.retire(id)
		}
		return
	}
	if d.prefetch(w) {
		return
	}
	d.releaseOutdated(id, w)
	if len(d.actions) > before {
		return
	}
	d.deliverConfigs(w)
	if d.mayTry(w) {
		d.acquire(w)
	}
}

// deliverConfigs gives running containers the config of now. One that a new config must restart has another spec, and
// is replaced instead.
func (d *differ) deliverConfigs(w Workload) {
	for _, c := range d.containers[w.MemberID] {
		if s, known := serviceNamed(w, c.Service); known && c.Status == Running && c.ConfigSHA256 != s.ConfigSHA256 {
			d.add(DeliverConfig{MemberID: w.MemberID, ContainerID: c.ID, Service: s})
		}
	}
}

// Answers of blockedBy: refused for a workload that the node must not start, unverified for one whose lease it cannot
// verify.
const (
	refused    = "refused"
	unverified = "unverified"
)

// inDoubt reports whether the desired state of the member is unknown: its document is missing, or no state verifies.
func (d *differ) inDoubt(id string) bool {
	_, waits := d.missing[id]
	return waits || d.desired.Unverified && d.observed.Members[id].Removal == nil
}

// keepsRunning reports whether something of a refused workload goes on: it was started while it was admitted (its
// publisher's key may have been revoked since), its owner does not mind, and its lease covers it.
func (d *differ) keepsRunning(w Workload) bool {
	return w.Refused != protocol.WorkloadStatus_OWNER_REFUSED && d.leases[w.MemberID].Covers(d.now) &&
		slices.ContainsFunc(d.containers[w.MemberID], func(c Container) bool {
			return isCurrent(w, c) && (c.Status == Running || c.Status == Unknown)
		})
}

// isCurrent reports whether the container may go on under the workload: its service, revision and spec are the
// workload's. A refused workload has no spec that the node could start, or that it surely understands, so its revision
// goes on with the spec that it was started with.
func isCurrent(w Workload, c Container) bool {
	s, known := serviceNamed(w, c.Service)
	return known && c.Revision == w.Revision && (c.SpecDigest == s.SpecDigest || w.Refused != 0)
}

// blockedBy says why nothing of the member may run now; empty when it may.
func (d *differ) blockedBy(w Workload, wanted bool) string {
	switch {
	case !wanted:
		return "left_state"
	case w.Stopped:
		return "stopped"
	case w.Refused != 0:
		return refused
	case d.leases[w.MemberID].Unverified:
		return unverified
	case !d.leases[w.MemberID].Covers(d.now):
		return "lease_ended"
	default:
		return ""
	}
}

// revisionDecision gives the decision that is due about a revision with a fallback, which is made durable before
// anything follows from it; nil when none is.
func (d *differ) revisionDecision(w Workload) Action {
	m := d.observed.Members[w.MemberID]
	if w.Fallback == nil || w.Stopped || m.FellBackFrom == w.Revision || m.ConfirmedRevision == w.Revision {
		return nil
	}
	if reason, detail := d.failure(w, m); reason != 0 {
		return FallBack{MemberID: w.MemberID, Revision: w.Revision, Reason: reason, Detail: detail}
	}
	if d.blockedBy(w, true) == "" && d.allReady(w) {
		return ConfirmRevision{MemberID: w.MemberID, Revision: w.Revision}
	}
	return nil
}

// failure says why a revision that was never ready has failed; empty while it has not.
func (d *differ) failure(w Workload, m Member) (reason protocol.WorkloadStatus_Reason, detail string) {
	switch d.blockedBy(w, true) {
	case "":
	case refused:
		return w.Refused, w.RefusedDetail
	default:
		// A revision that may not run now has not failed.
		return 0, ""
	}
	if m.Failures > 0 && m.FailedRevision == w.Revision && m.failedForFallback() {
		return m.Reason, m.Detail
	}
	for _, c := range d.containers[w.MemberID] {
		if c.Revision == w.Revision && c.Status == Running && c.ReadyAt.IsZero() &&
			!d.now.Before(c.StartedAt.Add(readinessTimeout(w))) {
			return protocol.WorkloadStatus_READINESS_TIMEOUT, "not ready within " + readinessTimeout(w).String()
		}
	}
	return 0, ""
}

func (d *differ) allReady(w Workload) bool {
	ready := 0
	for _, c := range d.containers[w.MemberID] {
		if c.Revision == w.Revision && c.Status == Running && !c.ReadyAt.IsZero() {
			ready++
		}
	}
	return ready >= max(len(w.Services), 1)
}

// prefetch pulls the images of an upgrade while its fallback runs: a failed pull must not end a serving container. It
// reports whether the upgrade has to wait.
func (d *differ) prefetch(w Workload) bool {
	serves := w.Fallback != nil && slices.ContainsFunc(d.containers[w.MemberID], func(c Container) bool {
		return c.Status == Running && c.Revision == w.Fallback.Revision
	})
	return serves && d.pull(w)
}

// pull pulls the images of the services that have no container yet, if the revision may be tried. It reports whether
// any image is missing.
func (d *differ) pull(w Workload) (missing bool) {
	pulled := make(map[string]bool)
	for _, s := range w.Services {
		if d.observed.Images[s.Image] || d.hasCurrent(w, s) {
			continue
		}
		missing = true
		if !pulled[s.Image] && d.mayTry(w) {
			pulled[s.Image] = true
			d.add(PullImage{MemberID: w.MemberID, Revision: w.Revision, Image: s.Image})
		}
	}
	return missing
}

func (d *differ) hasCurrent(w Workload, s Service) bool {
	return slices.ContainsFunc(d.containers[w.MemberID], func(c Container) bool {
		return c.Service == s.Name && c.Revision == w.Revision && c.SpecDigest == s.SpecDigest
	})
}

// releaseAll releases everything of a member, in order: processes, containers, network.
func (d *differ) releaseAll(id string, w Workload, why string) {
	before := len(d.actions)
	for _, c := range d.containers[id] {
		d.release(c, graceOf(w, c), why)
	}
	if _, attached := d.networks[id]; attached && len(d.actions) == before && len(d.containers[id]) == 0 {
		d.add(RemoveNetwork{MemberID: id})
	}
}

// releaseOutdated releases what the workload does not contain: other revisions and specs, unknown services, second
// copies, and exited containers.
func (d *differ) releaseOutdated(id string, w Workload) {
	live := make(map[string]bool)
	for _, c := range d.containers[id] {
		switch {
		case !isCurrent(w, c):
			d.release(c, graceOf(w, c), "replaced")
		case d.lostDevice(c):
			d.release(c, graceOf(w, c), "device_lost")
		case c.Status == Exited:
			d.releaseExited(c, true)
		case c.Status == Created:
			d.release(c, 0, "cut_short")
		case live[c.Service]:
			d.release(c, graceOf(w, c), "duplicate")
		default:
			live[c.Service] = true
		}
	}
	n, attached := d.networks[id]
	if attached && n.Revision != w.Revision && len(live) == 0 && len(d.containers[id]) == 0 {
		d.add(RemoveNetwork{MemberID: id})
	}
}

func (d *differ) release(c Container, grace time.Duration, why string) {
	switch c.Status {
	case Exited:
		d.releaseExited(c, false)
	case Created:
		d.add(RemoveContainer{MemberID: c.MemberID, ContainerID: c.ID})
	case Running, Unknown:
		d.add(StopContainer{MemberID: c.MemberID, ContainerID: c.ID, Grace: grace, Why: why})
	}
}

func (d *differ) releaseExited(c Container, unasked bool) {
	if !c.ExitRecorded {
		d.add(RecordExit{MemberID: c.MemberID, ContainerID: c.ID, Revision: c.Revision, Unasked: unasked})
		return
	}
	d.add(RemoveContainer{MemberID: c.MemberID, ContainerID: c.ID})
}

func (d *differ) recordExits(id string, unasked bool) {
	for _, c := range d.containers[id] {
		if c.Status == Exited && !c.ExitRecorded {
			d.releaseExited(c, unasked)
		}
	}
}

// retire closes a member that has left both the state and the machine.
func (d *differ) retire(id string) {
	m, remembered := d.observed.Members[id]
	if remembered && m.Removal == nil {
		d.add(RetireMember{MemberID: id})
	}
}

// mayTry reports whether the pause after the revision's last failure is over. A revision that has filled its disk limit
// repeatedly is not tried again.
func (d *differ) mayTry(w Workload) bool {
	m := d.observed.Members[w.MemberID]
	if m.FailedRevision != w.Revision {
		return true
	}
	return !d.now.Before(m.RetryAt) && (m.Reason != protocol.WorkloadStatus_DISK_LIMIT || !m.gaveUp())
}

// acquire gets what the workload lacks. Images and network do not wait for each other; containers wait for the images
// and are created in parallel to the network.
func (d *differ) acquire(w Workload) {
	pulling := d.pull(w)
	if n, attached := d.networks[w.MemberID]; !attached || n.Revision != w.Revision {
		setup := SetupNetwork{MemberID: w.MemberID, Revision: w.Revision, Workload: w}
		if !pulling {
			setup.Start = d.starts(w)
		}
		d.add(setup)
		return
	}
	if pulling {
		return
	}
	for _, start := range d.starts(w) {
		d.add(start)
	}
}

// starts are the containers that the workload lacks and whose accelerators are free and work.
func (d *differ) starts(w Workload) []StartContainer {
	var starts []StartContainer
	for _, s := range w.Services {
		if state, _ := d.unusable(s.AcceleratorIDs); state != 0 || d.runs(w.MemberID, s.Name) ||
			d.anyInUse(s.AcceleratorIDs) {
			continue
		}
		for _, id := range s.AcceleratorIDs {
			d.inUse[id] = true
		}
		starts = append(starts, StartContainer{
			MemberID: w.MemberID, Revision: w.Revision, LeaseNo: d.leases[w.MemberID].No, Workload: w, Service: s,
		})
	}
	return starts
}

func (d *differ) runs(memberID, service string) bool {
	return slices.ContainsFunc(d.containers[memberID], func(c Container) bool { return c.Service == service })
}

func (d *differ) anyInUse(ids []string) bool {
	return slices.ContainsFunc(ids, func(id string) bool { return d.inUse[id] })
}

func (d *differ) add(a Action) { d.actions = append(d.actions, a) }

func serviceNamed(w Workload, name string) (Service, bool) {
	i := slices.IndexFunc(w.Services, func(s Service) bool { return s.Name == name })
	if i < 0 {
		return Service{}, false
	}
	return w.Services[i], true
}

func graceOf(w Workload, c Container) time.Duration {
	s, _ := serviceNamed(w, c.Service)
	return cmp.Or(s.StopGrace, DefaultStopGrace)
}
