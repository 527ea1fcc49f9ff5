package agent

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// Diff returns what to do next, sorted: releases first, so that an accelerator, a port or an address is seen free before it
// is taken again. It returns nothing once the machine is as it should be. A member that gives something back takes nothing
// in the same pass, and a member with an action under way is left alone.
func Diff(desired Desired, leases Leases, observed Observed, now time.Time) []Action {
	d := differ{desired: desired, leases: leases, observed: observed, now: now}
	d.index()
	for _, id := range d.memberIDs() {
		d.member(id)
	}
	slices.SortStableFunc(d.actions, func(a, b Action) int {
		return cmp.Or(cmp.Compare(a.order(), b.order()), cmp.Compare(a.about(), b.about()))
	})
	return d.actions
}

type differ struct {
	desired  Desired
	leases   Leases
	observed Observed
	now      time.Time

	workloads  map[string]Workload
	missing    map[string]MissingPart
	containers map[string][]Container
	networks   map[string]Network
	// held are the accelerators of containers that exist, whatever their status.
	held    map[string]bool
	actions []Action
}

func (d *differ) index() {
	d.workloads = make(map[string]Workload, len(d.desired.Workloads))
	for _, w := range d.desired.Workloads {
		d.workloads[w.MemberID] = w
	}
	d.missing = make(map[string]MissingPart, len(d.desired.Missing))
	for _, p := range d.desired.Missing {
		d.missing[p.MemberID] = p
	}
	d.containers = make(map[string][]Container)
	d.held = make(map[string]bool)
	for _, c := range d.observed.Containers {
		d.containers[c.MemberID] = append(d.containers[c.MemberID], c)
		for _, id := range c.AcceleratorIDs {
			d.held[id] = true
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

// memberIDs are all that anything is known of, sorted.
func (d *differ) memberIDs() []string {
	ids := make(map[string]bool)
	for id := range d.workloads {
		ids[id] = true
	}
	for id := range d.missing {
		ids[id] = true
	}
	for id := range d.containers {
		ids[id] = true
	}
	for id := range d.networks {
		ids[id] = true
	}
	for id := range d.observed.Members {
		ids[id] = true
	}
	for id := range d.observed.Busy {
		ids[id] = true
	}
	return slices.Sorted(maps.Keys(ids))
}

func (d *differ) member(id string) {
	w, wanted := d.workloads[id]
	part, waits := d.missing[id]
	why := d.whyNot(w, wanted)
	if busy := d.observed.Busy[id]; busy.Other {
		return
	} else if busy.Pulling {
		if why != "" && !waits {
			d.add(CancelPull{MemberID: id})
		}
		return
	}
	if waits {
		// The document may say anything, so what runs goes on and its exits stay on record; nothing is started.
		d.recordExits(id, false)
		d.add(FetchPart(part))
		return
	}
	before := len(d.actions)
	if why != "" {
		d.releaseAll(id, w, why)
		if len(d.actions) == before && !wanted {
			d.retire(id)
		}
		return
	}
	d.releaseOutdated(id, w)
	if len(d.actions) == before && d.mayTry(w) {
		d.acquire(w)
	}
}

// whyNot says why nothing of the member may run now; empty when it may.
func (d *differ) whyNot(w Workload, wanted bool) string {
	switch {
	case !wanted:
		return "left_state"
	case w.Refused != "":
		return "refused"
	case w.Stopped:
		return "stopped"
	case !d.leases[w.MemberID].Covers(d.now):
		return "lease_ended"
	default:
		return ""
	}
}

// releaseAll lets go of everything of a member, in order: processes, containers, network.
func (d *differ) releaseAll(id string, w Workload, why string) {
	before := len(d.actions)
	for _, c := range d.containers[id] {
		d.release(c, graceOf(w, c), why)
	}
	if _, attached := d.networks[id]; attached && len(d.actions) == before && len(d.containers[id]) == 0 {
		d.add(RemoveNetwork{MemberID: id})
	}
}

// releaseOutdated lets go of what the workload does not want: other revisions, other specs, unknown services, second
// copies, and containers that have ended.
func (d *differ) releaseOutdated(id string, w Workload) {
	live := make(map[string]bool)
	for _, c := range d.containers[id] {
		service, known := serviceNamed(w, c.Service)
		switch {
		case !known || c.Revision != w.Revision || c.SpecDigest != service.SpecDigest:
			d.release(c, graceOf(w, c), "replaced")
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
		d.add(RemoveContainer{MemberID: c.MemberID, ContainerID: c.ID, RunID: c.RunID})
	case Running, Unknown:
		d.add(StopContainer{MemberID: c.MemberID, ContainerID: c.ID, Service: c.Service, Grace: grace, Why: why})
	}
}

func (d *differ) releaseExited(c Container, unasked bool) {
	if !c.ExitRecorded {
		d.add(RecordExit{
			MemberID: c.MemberID, ContainerID: c.ID, Service: c.Service, Revision: c.Revision, RunID: c.RunID, Unasked: unasked,
		})
		return
	}
	d.add(RemoveContainer{MemberID: c.MemberID, ContainerID: c.ID, RunID: c.RunID})
}

func (d *differ) recordExits(id string, unasked bool) {
	for _, c := range d.containers[id] {
		if c.Status == Exited && !c.ExitRecorded {
			d.releaseExited(c, unasked)
		}
	}
}

// retire closes a member that has left the state and of which nothing is left on the machine.
func (d *differ) retire(id string) {
	m, remembered := d.observed.Members[id]
	if remembered && m.Removal == nil {
		d.add(RetireMember{MemberID: id, InstanceID: m.InstanceID})
	}
}

// mayTry holds back a revision that has just failed.
func (d *differ) mayTry(w Workload) bool {
	m := d.observed.Members[w.MemberID]
	return m.FailedRevision != w.Revision || !d.now.Before(m.RetryAt)
}

// acquire takes what the workload still lacks. Images and network do not wait for each other; containers wait for both.
func (d *differ) acquire(w Workload) {
	before := len(d.actions)
	pulled := make(map[string]bool)
	for _, s := range w.Services {
		if !d.observed.Images[s.Image] && !pulled[s.Image] && !d.runs(w.MemberID, s.Name) {
			pulled[s.Image] = true
			d.add(PullImage{MemberID: w.MemberID, Revision: w.Revision, Image: s.Image})
		}
	}
	if n, attached := d.networks[w.MemberID]; !attached || n.Revision != w.Revision {
		d.add(SetupNetwork{MemberID: w.MemberID, Revision: w.Revision, Workload: w})
	}
	if len(d.actions) > before {
		return
	}
	for _, s := range w.Services {
		if d.runs(w.MemberID, s.Name) || d.anyHeld(s.AcceleratorIDs) {
			continue
		}
		for _, id := range s.AcceleratorIDs {
			d.held[id] = true
		}
		d.add(StartContainer{
			MemberID: w.MemberID, Revision: w.Revision, LeaseNo: d.leases[w.MemberID].No, Workload: w, Service: s,
		})
	}
}

func (d *differ) runs(memberID, service string) bool {
	return slices.ContainsFunc(d.containers[memberID], func(c Container) bool { return c.Service == service })
}

func (d *differ) anyHeld(ids []string) bool {
	return slices.ContainsFunc(ids, func(id string) bool { return d.held[id] })
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
	if s, known := serviceNamed(w, c.Service); known && s.StopGrace > 0 {
		return s.StopGrace
	}
	return DefaultStopGrace
}
