// Package agent decides what a node does next: Diff compares the signed state, the leases and the machine, and returns
// actions; Statuses derives the report to the hub. It is pure: no I/O, no clock. It does not execute
// anything (agent/internal/reconcile) and remembers nothing (agent/internal/state).
package agent

import (
	"time"

	"github.com/gpuaas/gpuaas/protocol"
)

// Desired is the accepted desired state, ready to compare.
type Desired struct {
	Epoch      uint64
	Generation uint64
	// Workloads are those whose documents the node holds, ordered by member id.
	Workloads []Workload
	// Missing names members whose documents are not here yet. What runs of them stays as it is.
	Missing []MissingPart
	// Unverified: the node has no state that verifies. Nothing starts, and running containers go on until their leases
	// end.
	Unverified bool
}

// MissingPart is a document that the state names and the node has yet to fetch.
type MissingPart struct {
	MemberID string
	SHA256   [32]byte
}

// Workload is what runs for one member.
type Workload struct {
	MemberID      string
	InstanceID    string
	Revision      uint64
	CorrelationID string
	// Stopped keeps the member's place (ports, volumes, lease) with nothing running.
	Stopped bool
	// Refused is set when the node must not start this workload. A workload that the owner refuses is stopped as well;
	// under any other refusal, running containers of this revision go on.
	Refused protocol.WorkloadStatus_Reason
	// RefusedDetail is for people.
	RefusedDetail string
	// ReadinessTimeout of zero means DefaultReadinessTimeout.
	ReadinessTimeout time.Duration
	Services         []Service
	// Fallback runs instead when this revision fails before it was ever ready. It is admitted and has no fallback of its
	// own.
	Fallback *Workload `json:",omitempty"`
}

// Effective returns the workload that runs: the fallback, once the node has fallen back.
func (w Workload) Effective(m Member) Workload {
	if w.Fallback != nil && m.FellBackFrom == w.Revision {
		return *w.Fallback
	}
	return w
}

// Service is one container of a workload.
type Service struct {
	Name string
	// Image is <repository>@sha256:<hex>.
	Image string
	// SpecDigest changes whenever anything about the container must.
	SpecDigest string
	// StopGrace is how long the process has between SIGTERM and SIGKILL; zero means DefaultStopGrace.
	StopGrace      time.Duration
	AcceleratorIDs []string
	// ConfigSHA256 is the digest of the config that its container must have, in hex; empty where there is none.
	ConfigSHA256 string `json:",omitempty"`
	// Spec is what the executor starts; Diff passes it through unread.
	Spec *protocol.Service
}

// Lease is the newest lease of a member.
type Lease struct {
	MemberID  string
	No        uint64
	ExpiresAt time.Time
	// Exhausted says that its cap is spent.
	Exhausted bool
	// RunsUnbilled is the end policy run_unbilled, allowed by the owner of this node.
	RunsUnbilled bool
	// Unverified says that the member may have a lease that the node cannot verify: what runs goes on, and nothing is
	// started.
	Unverified bool
}

// Covers reports whether the member may run at this time.
func (l Lease) Covers(now time.Time) bool {
	if l.No == 0 || l.Unverified {
		return false
	}
	return l.RunsUnbilled || (!l.Exhausted && now.Before(l.ExpiresAt))
}

// Leases holds the newest lease of each member.
type Leases map[string]Lease

// ContainerStatus is what the runtime says of a container.
type ContainerStatus string

// The statuses.
const (
	// Created has no process yet: its start was interrupted.
	Created ContainerStatus = "created"
	Running ContainerStatus = "running"
	Exited  ContainerStatus = "exited"
	// Unknown is neither: the runtime could not tell. It is left alone until it can.
	Unknown ContainerStatus = "unknown"
)

// Container is one container on the machine that belongs to this agent: one start of one service.
type Container struct {
	ID         string
	MemberID   string
	InstanceID string
	Service    string
	Revision   uint64
	SpecDigest string
	Status     ContainerStatus
	StartedAt  time.Time
	ExitedAt   time.Time
	ExitCode   int32
	// ExitRecorded says that exit code and usage are durable, so that the container may be removed.
	ExitRecorded   bool
	AcceleratorIDs []string
	// ConfigSHA256 is the digest of the config that it has, in hex.
	ConfigSHA256 string `json:",omitempty"`
	// ReadyAt is when its readiness probe first succeeded in this run; zero while it has not.
	ReadyAt time.Time
	// Failing says that the probe has failed lately after it had succeeded.
	Failing bool
}

// Network is a member's network attachment.
type Network struct {
	MemberID string
	// Revision is the one it was made for; 0 for an attachment whose setup was interrupted.
	Revision uint64
}

// Member is what the node remembers of a member besides its containers.
type Member struct {
	ID         string
	InstanceID string
	// CorrelationID is the one of the last workload seen for it.
	CorrelationID string
	// Failures counts failed starts and early exits of FailedRevision in a row.
	Failures       uint32
	FailedRevision uint64
	// RetryAt is when the next start may be tried.
	RetryAt time.Time
	// Reason and Detail say why the last try failed.
	Reason protocol.WorkloadStatus_Reason
	Detail string
	// GaveUp says that trying FailedRevision again cannot help (a wrong digest, a bad signature).
	GaveUp bool
	// Restarts counts containers started again after an exit, of the present revision.
	Restarts  uint32
	ExitedAt  time.Time
	ExitCode  int32
	Endpoints []*protocol.PublishedEndpoint
	// NetworkRevision is the workload revision that the member's network was made for, written before it is made.
	NetworkRevision uint64 `json:",omitempty"`
	// NetworkReady says that its setup has finished.
	NetworkReady bool `json:",omitempty"`
	// FellBackFrom is the revision that the node left for its fallback; FallbackReason and FallbackDetail say why.
	FellBackFrom   uint64                         `json:",omitempty"`
	FallbackReason protocol.WorkloadStatus_Reason `json:",omitempty"`
	FallbackDetail string                         `json:",omitempty"`
	// ConfirmedRevision was ready once: it is never left for its fallback.
	ConfirmedRevision uint64 `json:",omitempty"`
	// Removal is set once nothing of the member is left.
	Removal *protocol.RemovalProof
}

// Observed is one complete snapshot of machine and store.
type Observed struct {
	Containers []Container
	Networks   []Network
	Members    map[string]Member
	// Images are those pulled, unpacked and ready for a container.
	Images map[string]bool
	// Busy are members with a running action; the snapshot may show it half done.
	Busy map[string]Work
	// Unusable has the accelerators that desired workloads or containers name and that cannot be used.
	Unusable map[string]AcceleratorState
}

// Work is a set of kinds of action.
type Work struct {
	// Pulling is an image pull; it may take minutes and can be cancelled.
	Pulling bool
	// Other is anything else; it ends by itself.
	Other bool
}

// Limits and times of restarts.
const (
	// CrashLoopAfter early exits in a row a revision counts as failed. It is still tried, at BackoffMax.
	CrashLoopAfter = 5
	// GiveUpAfter is the same for starts that never came to a running container. A pull that may still succeed has no such
	// bound, except that an upgrade is left for its fallback.
	GiveUpAfter = 9
	// BackoffMin is the pause after the first failure; it doubles up to BackoffMax.
	BackoffMin = time.Second
	BackoffMax = 5 * time.Minute
	// StableAfter is the running time after which an exit counts as the first failure again.
	StableAfter = 10 * time.Minute
	// DefaultReadinessTimeout and DefaultStopGrace stand for values that a manifest leaves out.
	DefaultReadinessTimeout = 5 * time.Minute
	DefaultStopGrace        = 10 * time.Second
)

// Backoff is the pause after this many failures in a row.
func Backoff(failures uint32) time.Duration {
	if failures == 0 {
		return 0
	}
	pause := BackoffMin
	for range failures - 1 {
		if pause *= 2; pause >= BackoffMax {
			return BackoffMax
		}
	}
	return pause
}

// gaveUp reports whether the failures of the revision are enough to call it failed.
func (m Member) gaveUp() bool {
	switch m.Reason {
	case protocol.WorkloadStatus_CRASH_LOOP, protocol.WorkloadStatus_OUT_OF_MEMORY, protocol.WorkloadStatus_DISK_LIMIT:
		return m.Failures >= CrashLoopAfter
	case protocol.WorkloadStatus_IMAGE_PULL_FAILED:
		return m.GaveUp
	default:
		return m.GaveUp || m.Failures >= GiveUpAfter
	}
}

// failedForFallback reports whether the failures of a revision are enough to go back to its fallback.
func (m Member) failedForFallback() bool { return m.gaveUp() || m.Failures >= GiveUpAfter }

// Failed returns the member after another failed try of the revision. ran is how long the container was up, zero when
// it never was.
func (m Member) Failed(revision uint64, reason protocol.WorkloadStatus_Reason, detail string, permanent bool,
	ran time.Duration, now time.Time,
) Member {
	imageCame := m.Reason == protocol.WorkloadStatus_IMAGE_PULL_FAILED &&
		reason != protocol.WorkloadStatus_IMAGE_PULL_FAILED
	if m.FailedRevision != revision || ran >= StableAfter || imageCame {
		m.Failures = 0
	}
	if m.FailedRevision != revision || imageCame {
		m.GaveUp = false
	}
	m.FailedRevision = revision
	m.Failures++
	m.Reason, m.Detail = reason, detail
	m.GaveUp = m.GaveUp || permanent
	m.RetryAt = now.Add(Backoff(m.Failures))
	if permanent {
		m.RetryAt = now.Add(BackoffMax)
	}
	return m
}
