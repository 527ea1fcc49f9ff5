package lifecycle

import (
	"math"
	"time"

	"github.com/gpuaas/gpuaas/protocol"
)

// ReportNo orders the reports of a node. Counter starts anew with each session.
type ReportNo struct {
	Session, Counter uint64
}

// Follows reports whether the report is newer than the newest one before; an outdated report changes nothing.
func (n ReportNo) Follows(newest ReportNo) bool {
	return n.Session > newest.Session || n.Session == newest.Session && n.Counter > newest.Counter
}

// Report is the part of a node's report that concerns all its members.
type Report struct {
	// Epoch and Generation name the signed state that the node had accepted.
	Epoch, Generation uint64
	// Incarnation is the one of the node's store.
	Incarnation string
	// UsageOwed: a restored hub still misses usage of the node. A member that the report does not mention is not gone
	// then: its bill would close before that usage is posted.
	UsageOwed bool
}

// Member is what nodes have reported of a member.
type Member struct {
	// Status is pending until a node reports the member.
	Status           protocol.WorkloadStatus_Status
	Reason           protocol.WorkloadStatus_Reason
	Detail           string
	ObservedRevision int64
	// ObservedIncarnation is the incarnation that reported the member last; empty where none did.
	ObservedIncarnation string
	// FallbackFrom is the revision that the node fell back from to the observed one; 0 when it did not fall back.
	FallbackFrom int64
	// FailingSince is when the node first reported this failure of the observed revision; zero while the member has not
	// failed.
	FailingSince time.Time
	// FailureConfirmed says that a later report repeated it.
	FailureConfirmed bool
	Unreachable      bool
	// Gone: the node's proof was complete, or its silence proved as much, or the node is lost.
	Gone bool
}

// Placed is a member with what decides about its end.
type Placed struct {
	Member
	// Desired is false once its instance is being decommissioned.
	Desired bool
	// AbsentEpoch and AbsentGeneration are of the first signed state without the member; 0 before there is one.
	AbsentEpoch, AbsentGeneration uint64
}

// Outcome is what a report means for a member.
type Outcome int

// The outcomes of Apply.
const (
	// Unchanged: the report is contact with the node, and says nothing of the member that counts.
	Unchanged Outcome = iota
	// Reported: the status in the report is the member's newest.
	Reported
	// Removed: nothing of the member is left on the node.
	Removed
)

// Apply returns the member after a report; s is its status there, nil where the report does not name the member.
func (p Placed) Apply(s *protocol.WorkloadStatus, r Report, now time.Time) (Member, Outcome) {
	next := p.Member
	next.Unreachable = false
	if s == nil {
		if !p.Desired && !r.UsageOwed && p.absence().Proven(r.Epoch, r.Generation, r.Incarnation) {
			next.Status, next.Gone = protocol.WorkloadStatus_REMOVED, true
			return next, Removed
		}
		return next, Unchanged
	}
	if !p.Desired && s.GetStatus() == protocol.WorkloadStatus_REMOVED && s.GetRemoval().Complete() {
		next.Status, next.Gone = protocol.WorkloadStatus_REMOVED, true
		return next, Removed
	}
	// A desired member without a revision is one whose document the node lacks. One that has left the state has no
	// revision any more; what is left of it is still worth showing.
	if p.Desired && s.GetRevision() == 0 && p.ObservedRevision > 0 {
		return next, Unchanged
	}
	// A node that went back to its fallback has a lower revision than before. Older reports have lost already.
	next.ObservedRevision, next.FallbackFrom = revisionOf(s.GetRevision()), revisionOf(s.GetFallbackFromRevision())
	if s.GetRevision() == 0 {
		next.ObservedRevision = p.ObservedRevision
	}
	next.Status, next.ObservedIncarnation = knownStatus(s.GetStatus()), r.Incarnation
	// A member that was stopped because it failed keeps the reason: the tenant still wants to read it.
	if next.Status != protocol.WorkloadStatus_STOPPED || s.GetReason() != 0 {
		next.Reason, next.Detail = KnownReason(s.GetReason()), s.GetDetail()
	}
	next.updateFailure(p.Member, now)
	return next, Reported
}

func (p Placed) absence() Absence {
	return Absence{
		Epoch:               p.AbsentEpoch,
		Generation:          p.AbsentGeneration,
		Observed:            p.ObservedRevision != 0 || p.Status != protocol.WorkloadStatus_PENDING,
		ObservedIncarnation: p.ObservedIncarnation,
	}
}

// revisionOf bounds a number that a node names by what the database can store.
func revisionOf(n uint64) int64 { return int64(min(n, math.MaxInt64)) }

// knownStatus keeps the API's list closed: a status of a newer node counts as pending.
func knownStatus(s protocol.WorkloadStatus_Status) protocol.WorkloadStatus_Status {
	if _, known := protocol.WorkloadStatus_Status_name[int32(s)]; !known || s == 0 {
		return protocol.WorkloadStatus_PENDING
	}
	return s
}

// State is what Advance needs of the member; a report of an older revision says nothing about the desired one.
func (m Member) State(desired int64) MemberState {
	s := MemberState{Unreachable: m.Unreachable, Gone: m.Gone}
	switch {
	case m.Lost():
		s.Lost, s.Status, s.Reason = true, protocol.WorkloadStatus_FAILED, protocol.WorkloadStatus_NODE_LOST
	case m.FallbackFrom != 0 && m.FallbackFrom == desired:
		s.RolledBackByNode, s.Reason = true, m.Reason
	case m.ObservedRevision == desired:
		s.Status, s.Reason = m.Status, m.Reason
		s.GaveUp = m.Status == protocol.WorkloadStatus_FAILED && m.FailureConfirmed && !isTemporary(m.Reason)
		if m.FallbackFrom != 0 && m.Status != protocol.WorkloadStatus_FAILED {
			// The reason is why the other revision was left.
			s.Reason = 0
		}
	}
	return s
}

// Lost reports whether the member ended with its node, unproved; one that was proved gone is removed.
func (m Member) Lost() bool { return m.Gone && m.Status == protocol.WorkloadStatus_FAILED }

// failureConfirmedAfter is how much later a report must repeat a failure until it counts: an image that is being
// replaced or an agent that is being upgraded is refused once and admitted in the next report. It is twice the longest
// time between two reports of a node.
const failureConfirmedAfter = 20 * time.Second

// deviceRepairTime is how long a node may take to reset and test an accelerator before the failure counts.
const deviceRepairTime = 15 * time.Minute

func confirmedAfter(r protocol.WorkloadStatus_Reason) time.Duration {
	if r == protocol.WorkloadStatus_DEVICE_FAULT {
		return deviceRepairTime
	}
	return failureConfirmedAfter
}

// updateFailure keeps since when a member fails, and whether a later report has repeated it.
func (m *Member) updateFailure(before Member, now time.Time) {
	switch {
	case m.Status != protocol.WorkloadStatus_FAILED:
		m.FailingSince, m.FailureConfirmed = time.Time{}, false
	case before.Status != protocol.WorkloadStatus_FAILED || before.Reason != m.Reason ||
		before.ObservedRevision != m.ObservedRevision || before.FailingSince.IsZero():
		m.FailingSince, m.FailureConfirmed = now, false
	case now.Sub(before.FailingSince) >= confirmedAfter(m.Reason):
		m.FailureConfirmed = true
	}
}
