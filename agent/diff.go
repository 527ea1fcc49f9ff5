package agent

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/protocol"
)

// Diff returns the next actions, sorted: releases first, so that an accelerator, port or address is observed free
// before it is used again. A member with a release acquires nothing in the same pass; a service that an action is under
// way for gets no other.
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
	networks   map[string][]Network
	// inUse are the accelerators of containers that exist, whatever their status.
	inUse map[string]bool
	// building has the member that installs an environment, by the environment's id.
	building map[string]string
	actions  []Action
	// stops are the containers of a member that are to be stopped, in an order that flushStops decides.
	stops []containerStop
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
	d.indexBuilds()
	d.networks = make(map[string][]Network)
	for _, n := range d.observed.Networks {
		d.networks[n.MemberID] = append(d.networks[n.MemberID], n)
	}
	for _, ns := range d.networks {
		slices.SortFunc(ns, func(a, b Network) int { return cmp.Compare(a.Service, b.Service) })
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
	busy := d.observed.Busy[id]
	if busy.Other {
		return
	}
	inDoubt := d.inDoubt(id) || why == unverified
	if len(busy.Pulling) > 0 && !inDoubt && (why != "" || !needsAll(w, busy.Pulling)) {
		d.add(CancelPull{MemberID: id})
		return
	}
	if inDoubt {
		// The signed state is unknown: running containers and pulls go on, exits are recorded, and nothing starts.
		if d.leases[id].Ended(d.now) {
			d.releaseAll(id, w, "lease_ended")
		} else {
			d.recordExits(id)
		}
		if waits {
			d.add(FetchPart(part))
		}
		return
	}
	if decision := d.revisionDecision(d.signed[id]); decision != nil {
		if !busy.any() && len(busy.Pulling) == 0 {
			d.add(decision)
		}
		return
	}
	before := len(d.actions)
	if why == "" && !busy.any() && d.publish(w) {
		return
	}
	if why == refused && d.keepsRunning(w) {
		d.releaseOutdated(id, w)
		return
	}
	if why != "" {
		d.releaseAll(id, w, why)
		if len(d.actions) == before && !wanted && !busy.any() {
			d.retire(id)
		}
		return
	}
	serving, waits := w, d.awaitsImages(w)
	if waits {
		serving = *w.Fallback
	}
	d.releaseOutdated(id, serving)
	if len(d.actions) > before {
		return
	}
	d.pull(w, waits)
	if serving.Refused != 0 {
		return // a fallback that goes on, and is not started again
	}
	d.deliver(serving)
	d.acquire(serving)
}

// needsAll reports whether each of the images is one of the workload's.
func needsAll(w Workload, images []string) bool {
	return !slices.ContainsFunc(images, func(image string) bool {
		return !slices.ContainsFunc(w.Services, func(s Service) bool { return slices.Contains(s.Images, image) })
	})
}

// deliver gives running containers the config and the secret parameters of now. One that new ones must restart has
// another spec, and is replaced instead.
func (d *differ) deliver(w Workload) {
	for _, c := range d.containers[w.MemberID] {
		s, known := serviceNamed(w, c.Service)
		if !known || c.Status != Running || !isCurrent(w, c) || d.busy(w.MemberID, c.Service) {
			continue
		}
		switch {
		case c.ConfigSHA256 != s.ConfigSHA256:
			d.add(DeliverConfig{MemberID: w.MemberID, ContainerID: c.ID, Service: s})
		case c.SecretsSHA256 != s.SecretsSHA256:
			d.add(DeliverSecrets{MemberID: w.MemberID, ContainerID: c.ID, Workload: w, Service: s})
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

// isCurrent reports whether the container may go on under the workload: its service and spec are the workload's. One of
// another revision must have been ready, as nothing would bound its time to become so, and must not have a volume whose
// content changes with the revision. A refused workload has no spec that the node could start, or that it surely
// understands, so its revision goes on with the spec that it was started with.
func isCurrent(w Workload, c Container) bool {
	s, known := serviceNamed(w, c.Service)
	switch {
	case !known:
		return false
	case c.Revision == w.Revision:
		return c.SpecDigest == s.SpecDigest || w.Refused != 0
	default:
		return c.SpecDigest == s.SpecDigest && w.Refused == 0 && (c.Status == Exited || !c.ReadyAt.IsZero()) &&
			!movesWithVolume(w, c, s)
	}
}

// Keeps reports whether one of the member's containers goes on as the service.
func (w Workload) Keeps(s Service, containers []Container) bool {
	return slices.ContainsFunc(containers, func(c Container) bool { return c.Service == s.Name && isCurrent(w, c) })
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
	case d.leases[w.MemberID].Unverified && !d.leases[w.MemberID].Ended(d.now):
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
	reason, detail := d.failure(w, m)
	switch {
	case reason != 0 && w.RollsBack:
		return nil // the tenant has left the fallback, which goes on until this one is ready
	case reason != 0:
		return FallBack{MemberID: w.MemberID, Revision: w.Revision, Reason: reason, Detail: detail}
	case d.blockedBy(w, true) == "" && d.allServe(w) && d.allPublished(w):
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
	if t := m.of(w.Revision); t.failedForFallback() {
		return t.Reason, t.Detail
	}
	for _, s := range w.Services {
		if t := m.Services[s.Name].of(w.Revision); t.failedForFallback() {
			return t.Reason, ofService(w, s.Name, t.Detail)
		}
	}
	for _, c := range d.containers[w.MemberID] {
		if isLate(w, c, d.now) {
			_, limit := timeToBeReady(w, c)
			return protocol.WorkloadStatus_READINESS_TIMEOUT, ofService(w, c.Service, "not ready within "+limit.String())
		}
	}
	return 0, ""
}

// ofService names the service in a detail, where there are several.
func ofService(w Workload, service, detail string) string {
	if len(w.Services) < 2 {
		return detail
	}
	return "service " + service + ": " + detail
}

// deadline is when a container should be ready; zero for one that is, or need not be. A one-shot service should be done
// by then.
func deadline(w Workload, c Container) time.Time {
	if c.Status != Running || !isCurrent(w, c) || !c.ReadyAt.IsZero() && !mustComplete(w, c.Service) {
		return time.Time{}
	}
	from, limit := timeToBeReady(w, c)
	return from.Add(limit)
}

// timeToBeReady is how long a container may take to become ready, or to complete, and from when that counts. For one
// that becomes ready by its probe, it does not count before the agent began to probe.
func timeToBeReady(w Workload, c Container) (from time.Time, limit time.Duration) {
	s, _ := serviceNamed(w, c.Service)
	switch {
	case s.BuildsEnvironment:
		return c.StartedAt, s.BuildTimeout + buildGrace
	case mustComplete(w, c.Service) || c.WatchedSince.Before(c.StartedAt):
		return c.StartedAt, readinessTimeout(w)
	}
	return c.WatchedSince, readinessTimeout(w)
}

// isLate reports whether the container's deadline has passed.
func isLate(w Workload, c Container, now time.Time) bool {
	until := deadline(w, c)
	return !until.IsZero() && !now.Before(until)
}

// mustComplete reports whether another service waits for this one to complete. While it runs it serves nobody, also
// where those that wait for it go on from the revision before.
func mustComplete(w Workload, service string) bool {
	return slices.ContainsFunc(w.Services, func(s Service) bool {
		return slices.Contains(s.DependsOn, Dependency{service, protocol.Dependency_SERVICE_COMPLETED_SUCCESSFULLY})
	})
}

// completed reports whether the service has done its work: one that installs an environment, when that is there, also
// where another member has installed it.
func (d *differ) completed(w Workload, s Service) bool {
	if s.BuildsEnvironment {
		return d.observed.Environments[s.Environment]
	}
	return d.observed.Members[w.MemberID].Services[s.Name].completed(w.Revision, s.SpecDigest)
}

// allServe reports whether each service is ready, or has done its work.
func (d *differ) allServe(w Workload) bool {
	return len(w.Services) > 0 && !slices.ContainsFunc(w.Services, func(s Service) bool {
		return !d.completed(w, s) && (mustComplete(w, s.Name) || !d.hasReady(w, s))
	})
}

// isReady reports whether the container serves, or did until its probe began to fail.
func isReady(w Workload, c Container) bool {
	return isCurrent(w, c) && c.Status == Running && !c.ReadyAt.IsZero()
}

// awaitsImages reports whether the fallback goes on, and is started again where it ends, until the images of an upgrade
// are there: a pull may fail, take hours, or wait for the hub. What was stopped before the upgrade has no networks.
func (d *differ) awaitsImages(w Workload) bool {
	m, back := d.observed.Members[w.MemberID], w.Fallback
	if back == nil || back.Refused == protocol.WorkloadStatus_OWNER_REFUSED || m.ConfirmedRevision == w.Revision ||
		!d.lacksImages(w) {
		return false
	}
	begun := slices.ContainsFunc(d.containers[w.MemberID], func(c Container) bool { return c.Revision == w.Revision })
	ran := slices.ContainsFunc(back.Services, func(s Service) bool { return m.Services[s.Attachment()].PortsDigest != "" })
	return d.serves(w) || back.Refused == 0 && ran && !begun && !d.lacksImages(*back)
}

// serves reports whether a container of the fallback runs that the workload replaces.
func (d *differ) serves(w Workload) bool {
	return w.Fallback != nil && slices.ContainsFunc(d.containers[w.MemberID], func(c Container) bool {
		return isReplaced(w, c)
	})
}

// isReplaced reports whether the container is one of the fallback that runs, and that the workload replaces.
func isReplaced(w Workload, c Container) bool {
	return w.Fallback != nil && c.Status == Running && isCurrent(*w.Fallback, c) && !isCurrent(w, c)
}

func (d *differ) hasCurrent(w Workload, s Service) bool {
	return w.Keeps(s, d.containers[w.MemberID])
}

// busy reports whether an action on the service runs.
func (d *differ) busy(memberID, service string) bool { return d.observed.Busy[memberID].With(service) }

// retire closes a member that has left both the state and the machine.
func (d *differ) retire(id string) {
	m, remembered := d.observed.Members[id]
	if remembered && m.Removal == nil {
		d.add(RetireMember{MemberID: id})
	}
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

func hasService(services []Service, name string) bool {
	return slices.ContainsFunc(services, func(s Service) bool { return s.Name == name })
}

func graceOf(w Workload, c Container) time.Duration {
	s, _ := serviceNamed(w, c.Service)
	return cmp.Or(s.StopGrace, c.StopGrace, DefaultStopGrace)
}
