package agent

import (
	"cmp"
	"encoding/hex"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/protocol"
)

// Statuses is what the node reports, one for each member that it knows, sorted by member id.
func Statuses(desired Desired, leases Leases, observed Observed, now time.Time) []*protocol.WorkloadStatus {
	d := differ{desired: desired, leases: leases, observed: observed, now: now}
	d.index()
	statuses := make([]*protocol.WorkloadStatus, 0, len(d.workloads))
	for _, id := range d.memberIDs() {
		statuses = append(statuses, d.status(id))
	}
	return statuses
}

func (d *differ) status(id string) *protocol.WorkloadStatus {
	m, cs := d.observed.Members[id], d.containers[id]
	w, wanted := d.workloads[id]
	s := &protocol.WorkloadStatus{
		MemberId: id, InstanceId: m.InstanceID, CorrelationId: m.CorrelationID, Restarts: m.Restarts,
		Endpoints: m.Endpoints, ExitedAt: stamp(m.ExitedAt), ExitCode: m.ExitCode,
	}
	empty := len(cs) == 0 && len(d.networks[id]) == 0
	switch {
	case d.inDoubt(id) && !wanted:
		s.Status = protocol.WorkloadStatus_PENDING
		if len(cs) > 0 {
			d.running(s, listedWorkload(cs, m), m)
		}
	case !wanted && m.Removal != nil && empty:
		s.Status, s.Removal, s.Endpoints = protocol.WorkloadStatus_REMOVED, m.Removal, nil
	case !wanted:
		s.Status = protocol.WorkloadStatus_STOPPING
	default:
		s.InstanceId, s.Revision, s.CorrelationId = w.InstanceID, w.Revision, w.CorrelationID
		s.Traceparent = w.Traceparent
		d.desiredStatus(s, w, m, empty)
		d.fallbackStatus(s, d.signed[id], m)
	}
	return s
}

// listedWorkload is what is known of a workload whose document is missing: the services that have containers, by the
// copy of each that has the published ports.
func listedWorkload(containers []Container, m Member) Workload {
	w := Workload{MemberID: containers[0].MemberID, Revision: containers[0].Revision}
	for _, c := range containers {
		s := Service{Name: c.Service, SpecDigest: c.SpecDigest, Copy: c.Copy}
		switch i := slices.IndexFunc(w.Services, func(s Service) bool { return s.Name == c.Service }); {
		case i < 0:
			w.Services = append(w.Services, s)
		case c.Copy == m.Services[c.Service].Published:
			w.Services[i] = s
		}
	}
	return w
}

// fallbackStatus adds that a fallback runs, from which revision, and why. While the decision about a revision is not
// durable, the status is STARTING: for the hub, a failed revision has ended, and the node never leaves a ready one.
func (d *differ) fallbackStatus(s *protocol.WorkloadStatus, w Workload, m Member) {
	if w.Fallback != nil && m.FellBackFrom == w.Revision {
		s.FallbackFromRevision, s.CorrelationId, s.Traceparent = w.Revision, w.CorrelationID, w.Traceparent
		if s.GetStatus() != protocol.WorkloadStatus_FAILED {
			s.Reason, s.Detail = m.FallbackReason, m.FallbackDetail
		}
		return
	}
	due := d.revisionDecision(w)
	if due == nil {
		return
	}
	s.Status, s.ReadyAt = protocol.WorkloadStatus_STARTING, nil
	if back, is := due.(FallBack); is {
		s.Reason, s.Detail = back.Reason, back.Detail
	}
}

func (d *differ) desiredStatus(s *protocol.WorkloadStatus, w Workload, m Member, empty bool) {
	why := d.blockedBy(w, true)
	if why == "lease_ended" && d.leases[w.MemberID].No > 0 {
		s.Reason = protocol.WorkloadStatus_LEASE_ENDED
	}
	switch {
	case why == refused && d.keepsRunning(w):
		d.running(s, w, m)
		if s.GetReason() == 0 {
			s.Reason, s.Detail = w.Refused, w.RefusedDetail
		}
	case why == refused:
		s.Status, s.Reason, s.Detail = protocol.WorkloadStatus_FAILED, w.Refused, w.RefusedDetail
	case why == unverified && empty:
		s.Status = protocol.WorkloadStatus_PENDING
	case why == unverified:
		d.running(s, w, m)
	case why != "" && !empty:
		s.Status = protocol.WorkloadStatus_STOPPING
	case why == "stopped":
		s.Status = protocol.WorkloadStatus_STOPPED
	case why == "lease_ended" && d.leases[w.MemberID].No == 0:
		// Its first lease is on the way.
		s.Status = protocol.WorkloadStatus_PENDING
	case why == "lease_ended":
		s.Status = protocol.WorkloadStatus_STOPPED
	default:
		d.running(s, w, m)
	}
}

// running derives the status of a workload that may run from its services: it is ready when each of them is, or has
// done its work.
func (d *differ) running(s *protocol.WorkloadStatus, w Workload, m Member) {
	d.times(s, w)
	services := make([]*protocol.ServiceStatus, 0, len(w.Services))
	for _, service := range w.Services {
		services = append(services, d.serviceStatus(w, m.Services[service.Name], service))
	}
	if len(services) > 1 {
		s.Services = services
	}
	d.memberStatus(s, w, m, services)
	if s.Status == protocol.WorkloadStatus_READY && d.runsUnknown(w) {
		s.Status = protocol.WorkloadStatus_STARTING // what the version before had beside is still ending
	}
	if s.Status != protocol.WorkloadStatus_READY && s.Status != protocol.WorkloadStatus_DEGRADED {
		s.ReadyAt = nil
	}
	d.deviceStatus(s, w)
}

// times adds the first start, the last readiness and the config of the containers that run.
func (d *differ) times(s *protocol.WorkloadStatus, w Workload) {
	configs := map[string]bool{}
	for _, c := range d.containers[w.MemberID] {
		if c.Status != Running || !goesOn(w, c) {
			continue
		}
		if service, _ := serviceNamed(w, c.Service); c.ConfigSHA256 != "" || service.ConfigSHA256 != "" {
			configs[c.ConfigSHA256] = true
		}
		if s.GetStartedAt() == nil || c.StartedAt.Before(s.GetStartedAt().AsTime()) {
			s.StartedAt = stamp(c.StartedAt)
		}
		if !c.ReadyAt.IsZero() && (s.GetReadyAt() == nil || c.ReadyAt.After(s.GetReadyAt().AsTime())) {
			s.ReadyAt = stamp(c.ReadyAt)
		}
	}
	for config := range configs {
		if sum, err := hex.DecodeString(config); err == nil && len(configs) == 1 {
			s.ConfigSha256 = sum
		}
	}
}

// goesOn reports whether the container counts for the workload: one of its revision does even if it is to be replaced.
func goesOn(w Workload, c Container) bool { return c.Revision == w.Revision || isCurrent(w, c) }

func (d *differ) serviceStatus(w Workload, r ServiceRecord, service Service) *protocol.ServiceStatus {
	s := &protocol.ServiceStatus{
		Name: service.Name, Status: protocol.ServiceStatus_STARTING, Restarts: r.Restarts, ExitCode: r.ExitCode,
		ExitedAt: stamp(r.ExitedAt),
	}
	tries := r.of(w.Revision)
	i := slices.IndexFunc(d.containers[w.MemberID], func(c Container) bool {
		return c.Service == service.Name && c.Status == Running && goesOn(w, c)
	})
	switch unmet := d.unmet(w, service); {
	case i >= 0:
		c := d.containers[w.MemberID][i]
		s.StartedAt, s.ReadyAt = stamp(c.StartedAt), stamp(c.ReadyAt)
		switch {
		case isLate(w, c, d.now):
			s.Status, s.Reason = protocol.ServiceStatus_FAILED, protocol.WorkloadStatus_READINESS_TIMEOUT
		case c.ReadyAt.IsZero() || mustComplete(w, service.Name) || !d.isPublished(w, service) ||
			d.runsOther(w.MemberID, service):
		case c.Failing:
			s.Status = protocol.ServiceStatus_UNHEALTHY
		default:
			s.Status = protocol.ServiceStatus_READY
		}
	case d.completed(w, service):
		s.Status = protocol.ServiceStatus_COMPLETED
	case tries.Failures > 0:
		s.Status, s.Reason, s.Detail = protocol.ServiceStatus_FAILED, tries.Reason, tries.Detail
	case unmet != "":
		s.Status, s.Detail = protocol.ServiceStatus_WAITING, "waits for service "+unmet
	case slices.ContainsFunc(d.observed.Busy[w.MemberID].Pulling, func(image string) bool {
		return slices.Contains(service.Images, image)
	}):
		s.Status = protocol.ServiceStatus_WAITING
	}
	return s
}

// memberStatus derives a member's status from those of its services. What has been ready in this revision and fails
// degrades a member while another service serves; what never was keeps it from starting.
func (d *differ) memberStatus(s *protocol.WorkloadStatus, w Workload, m Member, services []*protocol.ServiceStatus) {
	var serve, notReady int
	var failing, down, gaveUp, late *protocol.ServiceStatus
	onlyDown := true
	first := func(p **protocol.ServiceStatus, x *protocol.ServiceStatus, is bool) {
		if is && *p == nil {
			*p = x
		}
	}
	for _, x := range services {
		r := m.Services[x.GetName()]
		switch x.GetStatus() {
		case protocol.ServiceStatus_READY:
			serve++
		case protocol.ServiceStatus_UNHEALTHY:
			first(&failing, x, true)
		case protocol.ServiceStatus_COMPLETED:
		default:
			notReady++
			tries := r.of(w.Revision)
			timedOut := x.GetReason() == protocol.WorkloadStatus_READINESS_TIMEOUT
			first(&down, x, tries.Failures > 0 && !timedOut && x.GetStatus() == protocol.ServiceStatus_FAILED)
			first(&gaveUp, x, tries.gaveUp() && x.GetStatus() == protocol.ServiceStatus_FAILED)
			first(&late, x, timedOut)
			onlyDown = onlyDown && r.ReadyRevision == w.Revision
		}
	}
	say := func(status protocol.WorkloadStatus_Status, why *protocol.ServiceStatus) {
		s.Status = status
		if why != nil {
			s.Reason, s.Detail = why.GetReason(), ofService(w, why.GetName(), why.GetDetail())
		}
	}
	own := m.of(w.Revision)
	if own.Reason == protocol.WorkloadStatus_IMAGE_PULL_FAILED && !d.lacksImages(w) {
		own = Tries{} // the images have come since
	}
	switch {
	case len(services) > 0 && notReady == 0 && failing == nil:
		say(protocol.WorkloadStatus_READY, nil)
	case len(services) > 0 && notReady == 0:
		say(protocol.WorkloadStatus_DEGRADED, nil)
		if len(services) > 1 {
			s.Detail = ofService(w, failing.GetName(), "its readiness probe fails")
		}
	case onlyDown && serve > 0:
		say(protocol.WorkloadStatus_DEGRADED, cmp.Or(gaveUp, down, late))
	case own.Failures > 0:
		s.Status, s.Reason, s.Detail = protocol.WorkloadStatus_STARTING, own.Reason, own.Detail
		if own.gaveUp() {
			s.Status = protocol.WorkloadStatus_FAILED
		}
	case gaveUp != nil:
		say(protocol.WorkloadStatus_FAILED, gaveUp)
	case late != nil:
		s.Status, s.Reason = protocol.WorkloadStatus_FAILED, protocol.WorkloadStatus_READINESS_TIMEOUT
		if len(services) > 1 {
			s.Detail = ofService(w, late.GetName(), "not ready in time")
		}
	default:
		say(protocol.WorkloadStatus_STARTING, down)
	}
}

func readinessTimeout(w Workload) time.Duration {
	return cmp.Or(w.ReadinessTimeout, DefaultReadinessTimeout)
}

func stamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

// NextChange is when Diff or Statuses may answer otherwise although nothing was observed: a pause ends, a lease or a
// readiness timeout runs out. It is zero when time alone changes nothing.
func NextChange(desired Desired, leases Leases, observed Observed, now time.Time) time.Time {
	var next time.Time
	consider := func(t time.Time) {
		if t.After(now) && (next.IsZero() || t.Before(next)) {
			next = t
		}
	}
	d := differ{desired: desired, leases: leases, observed: observed, now: now}
	d.index()
	for _, w := range d.workloads {
		if l, leased := leases[w.MemberID]; leased && !l.RunsUnbilled {
			consider(l.ExpiresAt)
		}
		m := observed.Members[w.MemberID]
		for _, may := range w.MayRun() {
			consider(m.of(may.Revision).RetryAt)
			for _, s := range may.Services {
				consider(m.Services[s.Name].of(may.Revision).RetryAt)
			}
		}
		for _, c := range d.containers[w.MemberID] {
			consider(deadline(w, c))
		}
	}
	return next
}
