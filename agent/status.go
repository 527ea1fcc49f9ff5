package agent

import (
	"bytes"
	"cmp"
	"encoding/hex"
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
	_, attached := d.networks[id]
	empty := len(cs) == 0 && !attached
	switch {
	case d.inDoubt(id) && !wanted:
		s.Status = protocol.WorkloadStatus_PENDING
		if len(cs) > 0 {
			d.running(s, Workload{MemberID: id, Revision: cs[0].Revision}, m)
		}
	case !wanted && m.Removal != nil && empty:
		s.Status, s.Removal, s.Endpoints = protocol.WorkloadStatus_REMOVED, m.Removal, nil
	case !wanted:
		s.Status = protocol.WorkloadStatus_STOPPING
	default:
		s.InstanceId, s.Revision, s.CorrelationId = w.InstanceID, w.Revision, w.CorrelationID
		d.desiredStatus(s, w, m, empty)
		d.fallbackStatus(s, d.signed[id], m)
	}
	return s
}

// fallbackStatus adds that a fallback runs, from which revision, and why. While the decision to fall back is not
// durable, the status is STARTING and not FAILED: for the hub, a failed revision has ended.
func (d *differ) fallbackStatus(s *protocol.WorkloadStatus, w Workload, m Member) {
	if w.Fallback != nil && m.FellBackFrom == w.Revision {
		s.FallbackFromRevision, s.CorrelationId = w.Revision, w.CorrelationID
		if s.GetStatus() != protocol.WorkloadStatus_FAILED {
			s.Reason, s.Detail = m.FallbackReason, m.FallbackDetail
		}
		return
	}
	if back, due := d.revisionDecision(w).(FallBack); due {
		s.Status, s.Reason, s.Detail = protocol.WorkloadStatus_STARTING, back.Reason, back.Detail
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

// running derives the status of a workload that may run from its containers: it is ready when every service is.
func (d *differ) running(s *protocol.WorkloadStatus, w Workload, m Member) {
	var ready, failing, up int
	late := false
	for _, c := range d.containers[w.MemberID] {
		if c.Revision != w.Revision || c.Status != Running {
			continue
		}
		up++
		if sum, err := hex.DecodeString(c.ConfigSHA256); err == nil && up == 1 {
			s.ConfigSha256 = sum
		} else if !bytes.Equal(s.GetConfigSha256(), sum) {
			s.ConfigSha256 = nil
		}
		if s.GetStartedAt() == nil || c.StartedAt.Before(s.GetStartedAt().AsTime()) {
			s.StartedAt = stamp(c.StartedAt)
		}
		switch {
		case c.ReadyAt.IsZero():
			late = late || !d.now.Before(c.StartedAt.Add(readinessTimeout(w)))
			continue
		case c.Failing:
			failing++
		}
		ready++
		if s.GetReadyAt() == nil || c.ReadyAt.After(s.GetReadyAt().AsTime()) {
			s.ReadyAt = stamp(c.ReadyAt)
		}
	}
	failedThis := m.Failures > 0 && m.FailedRevision == w.Revision && up < max(len(w.Services), 1)
	switch {
	case up > 0 && ready >= max(len(w.Services), 1) && failing == 0:
		s.Status = protocol.WorkloadStatus_READY
	case up > 0 && ready >= max(len(w.Services), 1):
		s.Status = protocol.WorkloadStatus_DEGRADED
	case failedThis && m.gaveUp():
		s.Status, s.Reason, s.Detail = protocol.WorkloadStatus_FAILED, m.Reason, m.Detail
	case failedThis:
		s.Status, s.Reason, s.Detail = protocol.WorkloadStatus_STARTING, m.Reason, m.Detail
	case late:
		s.Status, s.Reason = protocol.WorkloadStatus_FAILED, protocol.WorkloadStatus_READINESS_TIMEOUT
	default:
		s.Status = protocol.WorkloadStatus_STARTING
	}
	if s.Status != protocol.WorkloadStatus_READY && s.Status != protocol.WorkloadStatus_DEGRADED {
		s.ReadyAt = nil
	}
	d.deviceStatus(s, w)
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
	for _, wanted := range desired.Workloads {
		w := wanted.Effective(observed.Members[wanted.MemberID])
		if l, leased := leases[w.MemberID]; leased && !l.RunsUnbilled {
			consider(l.ExpiresAt)
		}
		if m, known := observed.Members[w.MemberID]; known && m.FailedRevision == w.Revision {
			consider(m.RetryAt)
		}
		for _, c := range observed.Containers {
			if c.MemberID == w.MemberID && c.Status == Running && c.ReadyAt.IsZero() {
				consider(c.StartedAt.Add(readinessTimeout(w)))
			}
		}
	}
	return next
}
