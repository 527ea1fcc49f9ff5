package agent

import (
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/protocol"
)

type containerStop struct {
	container Container
	grace     time.Duration
	why       string
	drain     bool
}

// releaseAll releases everything of a member, in order: processes, containers, networks.
func (d *differ) releaseAll(id string, w Workload, why string) {
	before := len(d.actions)
	for _, c := range d.containers[id] {
		d.release(w, c, graceOf(w, c), why)
	}
	d.flushStops()
	if len(d.actions) > before || len(d.containers[id]) > 0 {
		return
	}
	for _, n := range d.networks[id] {
		if d.busy(id, n.Service) {
			continue
		}
		a := RemoveNetwork{MemberID: id, Service: n.Service, Copy: n.Copy, Ends: true}
		if s, known := serviceNamed(w, n.Service); known && d.completed(w, s) {
			a.Done = w.Revision
		}
		d.add(a)
	}
}

// releaseOutdated releases what the workload does not contain: other specs, unknown services, second copies, and exited
// containers.
func (d *differ) releaseOutdated(id string, w Workload) {
	live := make(map[string]bool)
	installs := d.installs(w)
	for _, c := range d.containers[id] {
		s, _ := serviceNamed(w, c.Service)
		switch {
		case d.servesBeside(w, c):
		case len(installs) > 0 && isReplaced(w, c) && !hasService(installs, c.Service):
		case !isCurrent(w, c):
			d.release(w, c, graceOf(w, c), "replaced")
		case d.lostDevice(c):
			d.release(w, c, graceOf(w, c), "device_lost")
		case c.Status == Exited && !live[c.Service] && d.staysForLog(w, s, c):
			live[c.Service] = true
		case c.Status == Exited:
			d.releaseExited(w, c, true)
		case c.Status == Created:
			d.release(w, c, 0, "cut_short")
		case live[c.Service]:
			d.release(w, c, graceOf(w, c), "duplicate")
		case c.NotAlive && c.Status == Running:
			d.release(w, c, graceOf(w, c), notAlive)
		default:
			live[c.Service] = true
		}
	}
	d.flushStops()
	for _, n := range d.networks[id] {
		s, known := serviceNamed(w, n.Service)
		outdated := !known || n.Copy != s.Copy || !n.Ready || n.PortsDigest != s.PortsDigest
		if outdated && !d.uses(n) && !d.busy(id, n.Service) {
			d.add(RemoveNetwork{MemberID: id, Service: n.Service, Copy: n.Copy})
		}
	}
}

// staysForLog reports whether a container that has ended stays until the next one of its service is started, since its
// log goes with it. What it has of the disk or of accelerators must be of no use to others.
func (d *differ) staysForLog(w Workload, s Service, c Container) bool {
	if !c.ExitRecorded {
		return false
	}
	if d.completed(w, s) {
		return len(c.AcceleratorIDs) == 0
	}
	full := d.observed.Members[w.MemberID].Services[s.Name].Reason == protocol.WorkloadStatus_DISK_LIMIT
	return !full && c.Environment == "" && !d.mayTry(w, s) && !slices.ContainsFunc(w.Services, func(o Service) bool {
		return o.Name != s.Name && slices.ContainsFunc(o.AcceleratorIDs, func(id string) bool {
			return slices.Contains(c.AcceleratorIDs, id)
		})
	})
}

func (d *differ) release(w Workload, c Container, grace time.Duration, why string) {
	switch c.Status {
	case Exited:
		d.releaseExited(w, c, false)
	case Created:
		d.addUnlessBusy(RemoveContainer{MemberID: c.MemberID, ContainerID: c.ID, Service: c.Service})
	case Running, Unknown:
		s, _ := serviceNamed(w, c.Service)
		drain := why == "replaced" && s.Copy != "" && s.Copy != c.Copy
		d.stops = append(d.stops, containerStop{c, grace, why, drain})
	}
}

// flushStops stops a container once none that depends on it is to be stopped before; all of them where they depend on
// each other.
func (d *differ) flushStops() {
	stops := d.stops
	d.stops = nil
	free := slices.DeleteFunc(slices.Clone(stops), func(s containerStop) bool {
		return slices.ContainsFunc(stops, func(o containerStop) bool {
			return o.container.Service != s.container.Service && slices.Contains(o.container.DependsOn, s.container.Service)
		})
	})
	if len(free) == 0 {
		free = stops
	}
	for _, s := range free {
		c := s.container
		d.addUnlessBusy(StopContainer{
			MemberID: c.MemberID, ContainerID: c.ID, Service: c.Service, Grace: s.grace, Why: s.why,
			Copy: c.Copy, Drain: s.drain,
		})
	}
}

func (d *differ) addUnlessBusy(a Action) {
	if !d.busy(a.memberID(), ServiceOf(a)) {
		d.add(a)
	}
}

func (d *differ) releaseExited(w Workload, c Container, unasked bool) {
	if c.ExitRecorded {
		d.addUnlessBusy(RemoveContainer{MemberID: c.MemberID, ContainerID: c.ID, Service: c.Service})
		return
	}
	// Of two containers the one that started last says how its service has ended: it is recorded in a later pass.
	if slices.ContainsFunc(d.actions, func(a Action) bool {
		r, records := a.(RecordExit)
		return records && r.MemberID == c.MemberID && r.Service == c.Service
	}) {
		return
	}
	revision := c.Revision
	if isCurrent(w, c) {
		revision = w.Revision
	}
	d.addUnlessBusy(RecordExit{
		MemberID: c.MemberID, ContainerID: c.ID, Service: c.Service, Revision: revision, SpecDigest: c.SpecDigest,
		Restart: c.Restart, Unasked: unasked,
	})
}

// recordExits records the exits of a member whose desired state is unknown: none is a failure.
func (d *differ) recordExits(id string) {
	for _, c := range d.containers[id] {
		if c.Status == Exited && !c.ExitRecorded {
			d.releaseExited(Workload{}, c, false)
		}
	}
}
