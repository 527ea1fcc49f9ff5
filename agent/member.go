package agent

import (
	"maps"
	"time"

	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/protocol"
)

// Member is what the node remembers of a member besides its containers.
type Member struct {
	ID         string
	InstanceID string
	// CorrelationID is the one of the last workload seen for it.
	CorrelationID string
	// Tries are those of what belongs to no single service: its networks.
	Tries
	// Restarts, ExitedAt and ExitCode are over all services.
	Restarts  uint32
	ExitedAt  time.Time
	ExitCode  int32
	Endpoints []*protocol.PublishedEndpoint
	// Services are by name. Networks are by the name of their attachment, which differs from the service's where it has a
	// copy. The map is never changed, only replaced.
	Services map[string]ServiceRecord `json:",omitempty"`
	// FellBackFrom is the revision that the node left for its fallback; FallbackReason and FallbackDetail say why.
	FellBackFrom   uint64                         `json:",omitempty"`
	FallbackReason protocol.WorkloadStatus_Reason `json:",omitempty"`
	FallbackDetail string                         `json:",omitempty"`
	// ConfirmedRevision was ready once: it is never left for its fallback.
	ConfirmedRevision uint64 `json:",omitempty"`
	// Removal is set once nothing of the member is left.
	Removal *protocol.RemovalProof
}

// ServiceRecord is what the node remembers of a service of a member.
type ServiceRecord struct {
	Tries
	Restarts uint32    `json:",omitempty"`
	ExitedAt time.Time `json:",omitzero"`
	ExitCode int32     `json:",omitempty"`
	// ReadyRevision is the last revision under which a container of the service that was ready has exited. A revision
	// that the node has left for its fallback does not count.
	ReadyRevision uint64 `json:",omitempty"`
	// Completed has the last completions, of which a fallback may need the one before.
	Completed []Completion `json:",omitempty"`
	// Published is the copy of the service that the published ports lead to.
	Published string `json:",omitempty"`
	// PortsDigest is of the service that its network was made for, written before that is made.
	PortsDigest string `json:",omitempty"`
	// NetworkReady says that the setup has finished, IP is the address.
	NetworkReady bool   `json:",omitempty"`
	IP           string `json:",omitempty"`
}

// Completion is an exit of a one-shot service that its restart policy takes for done.
type Completion struct {
	Revision uint64
	// SpecDigest is empty once the workload was stopped: another revision runs the service again then.
	SpecDigest string `json:",omitempty"`
}

// maxCompletions bounds the completions that are remembered: of the revision and of its fallback.
const maxCompletions = 2

// completed reports whether the service has done its work under the revision, or under another one with the same spec.
func (r ServiceRecord) completed(revision uint64, specDigest string) bool {
	for _, c := range r.Completed {
		if c.Revision == revision || c.SpecDigest != "" && c.SpecDigest == specDigest {
			return true
		}
	}
	return false
}

// updateService changes the record of a service.
func (m *Member) updateService(name string, change func(*ServiceRecord)) {
	services := make(map[string]ServiceRecord, len(m.Services)+1)
	maps.Copy(services, m.Services)
	r := services[name]
	change(&r)
	services[name] = r
	m.Services = services
}

// MoveTimes moves the member's times with the clock. It reports whether any was set.
func (m *Member) MoveTimes(by time.Duration) (moved bool) {
	moved = meter.MoveTimes(by, &m.RetryAt, &m.ExitedAt)
	for name, r := range m.Services {
		if meter.MoveTimes(by, &r.RetryAt, &r.ExitedAt) {
			m.updateService(name, func(old *ServiceRecord) { *old = r })
			moved = true
		}
	}
	return moved
}

// forgetTries forgets the failed tries of the revision that belong to no single service.
func (m *Member) forgetTries(revision uint64) {
	if m.FailedRevision == revision {
		m.Tries = Tries{}
	}
}

// Tried reports whether something of the revision has failed.
func (m Member) Tried(revision uint64) bool {
	for _, r := range m.Services {
		if r.FailedRevision == revision {
			return true
		}
	}
	return m.FailedRevision == revision
}

// MayStart reports whether a container of this revision may be started under the signed one, whose fallback may be
// zero: the fallback until the signed one was confirmed, and that until it was left.
func (m Member) MayStart(revision, signed, fallback uint64) bool {
	if revision == signed {
		return fallback == 0 || m.FellBackFrom != signed
	}
	return fallback > 0 && revision == fallback && m.ConfirmedRevision != signed
}

// Tries are the failed tries of a revision in a row.
type Tries struct {
	// Failures counts failed starts and early exits of FailedRevision.
	Failures       uint32
	FailedRevision uint64
	// RetryAt is when the next start may be tried.
	RetryAt time.Time
	// Reason and Detail say why the last try failed.
	Reason protocol.WorkloadStatus_Reason
	Detail string
	// GaveUp says that trying FailedRevision again cannot help (a wrong digest, a bad signature).
	GaveUp bool
}

// of are the tries of the revision; none where they are another one's.
func (t Tries) of(revision uint64) Tries {
	if t.FailedRevision != revision {
		return Tries{}
	}
	return t
}

// gaveUp reports whether the failures of the revision are enough to call it failed.
func (t Tries) gaveUp() bool {
	switch t.Reason {
	case protocol.WorkloadStatus_CRASH_LOOP, protocol.WorkloadStatus_OUT_OF_MEMORY, protocol.WorkloadStatus_DISK_LIMIT:
		return t.GaveUp || t.Failures >= CrashLoopAfter
	case protocol.WorkloadStatus_IMAGE_PULL_FAILED:
		return t.GaveUp
	default:
		return t.GaveUp || t.Failures >= GiveUpAfter
	}
}

// failedForFallback reports whether the failures of a revision are enough to go back to its fallback.
func (t Tries) failedForFallback() bool { return t.gaveUp() || t.Failures >= GiveUpAfter }

// pausing reports whether the pause after the last failure goes on. What has filled its disk limit repeatedly is not
// tried again.
func (t Tries) pausing(now time.Time) bool {
	return now.Before(t.RetryAt) || t.Reason == protocol.WorkloadStatus_DISK_LIMIT && t.gaveUp()
}

// failed returns the tries after another failed one of the revision. ran is how long the container was up, zero when it
// never was.
func (t Tries) failed(revision uint64, reason protocol.WorkloadStatus_Reason, detail string, permanent bool,
	ran time.Duration, now time.Time,
) Tries {
	imageCame := t.Reason == protocol.WorkloadStatus_IMAGE_PULL_FAILED &&
		reason != protocol.WorkloadStatus_IMAGE_PULL_FAILED
	if t.FailedRevision != revision || ran >= StableAfter || imageCame {
		t.Failures = 0
	}
	if t.FailedRevision != revision || imageCame {
		t.GaveUp = false
	}
	t.FailedRevision = revision
	t.Failures++
	t.Reason, t.Detail = reason, detail
	t.GaveUp = t.GaveUp || permanent
	t.RetryAt = now.Add(Backoff(t.Failures))
	if permanent {
		t.RetryAt = now.Add(BackoffMax)
	}
	return t
}
