package agent

import (
	"errors"
	"strconv"
	"time"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// What an executor makes durable of each action. RecordIntent comes before the action's effect, Record after it.

// Record makes the fallback the workload that runs.
func (a FallBack) Record(m *Member) {
	m.FellBackFrom, m.FallbackReason, m.FallbackDetail = a.Revision, a.Reason, a.Detail
}

// Record rules a fallback out.
func (a ConfirmRevision) Record(m *Member) { m.ConfirmedRevision = a.Revision }

// RecordIntent keeps the exit that follows from counting as a failure.
func (a StopContainer) RecordIntent(r *Run) { r.StopRequested = true }

// RecordMember stores the exit of a listed container, converted to the node's time. An exit that the agent did not
// request is a failed try of the revision, unless the machine ended the container: then it starts again at once.
func (a RecordExit) RecordMember(m *Member, run Run, l Listed, exited, now time.Time) {
	m.ExitedAt, m.ExitCode = exited, l.ExitCode
	if !a.Unasked || run.StopRequested {
		return
	}
	m.Restarts++
	if l.Lost {
		return
	}
	reason, detail := protocol.WorkloadStatus_CRASH_LOOP, "the container exited with code "+
		strconv.FormatUint(uint64(uint32(l.ExitCode)), 10)
	switch {
	case run.OverDisk != "":
		reason, detail = protocol.WorkloadStatus_DISK_LIMIT, run.OverDisk
	case l.OOMKilled:
		reason, detail = protocol.WorkloadStatus_OUT_OF_MEMORY, "the container used more memory than it may"
	}
	*m = m.Failed(a.Revision, reason, detail, false, exited.Sub(run.StartedAt), now)
}

// Record lets the container be removed.
func (a RecordExit) Record(r *Run, l Listed, exited time.Time) {
	r.ExitRecorded, r.ExitedAt, r.ExitCode = true, exited, l.ExitCode
}

// Record forgets the network.
func (a RemoveNetwork) Record(m *Member) { m.NetworkRevision, m.NetworkReady = 0, false }

// RecordIntent stores the attachment as not ready: Network gives it revision 0 until Record, and after a crash in
// between it is made again.
func (a SetupNetwork) RecordIntent(m *Member) { m.NetworkRevision, m.NetworkReady = a.Revision, false }

// Record makes the network usable.
func (a SetupNetwork) Record(m *Member) { m.NetworkReady = true }

// Record stores which config the container has.
func (a DeliverConfig) Record(r *Run) { r.ConfigSHA256 = a.Service.ConfigSHA256 }

// Network is the member's attachment as it was recorded.
func (m Member) Network() Network {
	n := Network{MemberID: m.ID}
	if m.NetworkReady {
		n.Revision = m.NetworkRevision
	}
	return n
}

// ErrHubAway marks an action that only lacked a session to the hub.
var ErrHubAway = errors.New("waiting for the hub")

// PauseAfter is the pause of the member after an action that failed through no fault of the workload: a release, or an
// acquisition while hub or containerd is away or the disk is full. It is zero for a failed try, see FailedBy.
func PauseAfter(a Action, err error) time.Duration {
	_, acquires := revisionOf(a)
	away := hasCode(err, CodeContainerdUnavailable)
	switch transient := errors.Is(err, ErrHubAway) || away || IsDiskFull(err); {
	case acquires && !transient:
		return 0
	case away, hasCode(err, CodeHubAway):
		return AwayRetry
	default:
		return ReleaseRetry
	}
}

// FailedBy returns the member after an acquisition that failed by fault of the workload.
func (m Member) FailedBy(a Action, err error, now time.Time) Member {
	revision, _ := revisionOf(a)
	return m.Failed(revision, reasonOf(a, err), fault.As(err).Public, fault.IsPermanent(err), 0, now)
}

func revisionOf(a Action) (revision uint64, acquires bool) {
	switch a := a.(type) {
	case PullImage:
		return a.Revision, true
	case SetupNetwork:
		return a.Revision, true
	case StartContainer:
		return a.Revision, true
	case ConfirmRevision, FallBack, CancelPull, StopContainer, RecordExit, RemoveContainer, RemoveNetwork, RetireMember,
		FetchPart, DeliverConfig:
	}
	return 0, false
}

// reasonOf returns a reason of the contract's closed list.
func reasonOf(a Action, err error) protocol.WorkloadStatus_Reason {
	switch {
	case IsFeatureMissing(err):
		return protocol.WorkloadStatus_FEATURE_MISSING
	case IsAcceleratorUnusable(err):
		return protocol.WorkloadStatus_DEVICE_FAULT
	case IsAcceleratorInUse(err), IsPortTaken(err):
		return protocol.WorkloadStatus_INSUFFICIENT_CAPACITY
	}
	if _, is := a.(PullImage); is {
		return protocol.WorkloadStatus_IMAGE_PULL_FAILED
	}
	return protocol.WorkloadStatus_INTERNAL
}
