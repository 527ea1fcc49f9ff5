package lifecycle

import (
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// Status is where an app instance is in its life (docs/design/overview.md).
type Status string

// The statuses of the contract.
const (
	Requested       Status = "requested"
	Deploying       Status = "deploying"
	Running         Status = "running"
	Upgrading       Status = "upgrading"
	RollingBack     Status = "rolling_back"
	Stopping        Status = "stopping"
	Stopped         Status = "stopped"
	Decommissioning Status = "decommissioning"
	Decommissioned  Status = "decommissioned"
	Failed          Status = "failed"
)

// Health is how well a running instance does. A partial failure shows here and not in the status.
type Health string

// The healths of the contract.
const (
	HealthUnknown   Health = "unknown"
	HealthHealthy   Health = "healthy"
	HealthDegraded  Health = "degraded"
	HealthUnhealthy Health = "unhealthy"
)

// KnownReason keeps the list closed: an unknown reason of a newer agent becomes internal; its text stays in the detail.
func KnownReason(r protocol.WorkloadStatus_Reason) protocol.WorkloadStatus_Reason {
	if _, known := protocol.WorkloadStatus_Reason_name[int32(r)]; !known {
		return protocol.WorkloadStatus_INTERNAL
	}
	return r
}

// Lifecycle is the part of an instance that transitions change.
type Lifecycle struct {
	Status Status
	Health Health
	// Reason is unspecified when all is well.
	Reason protocol.WorkloadStatus_Reason
}

// Step is one transition; each becomes one event.
type Step struct {
	From   Status
	To     Status
	Reason protocol.WorkloadStatus_Reason
}

// MemberState is what Advance needs of a member.
type MemberState struct {
	// Role is the component that the member is of; empty where a node runs it.
	Role string
	// Status is unspecified until the node reports the desired revision.
	Status protocol.WorkloadStatus_Status
	Reason protocol.WorkloadStatus_Reason
	// Unreachable: the hub has no contact with the node.
	Unreachable bool
	// Gone: the node proved that nothing of the member is left, or the node itself is gone for good.
	Gone bool
	// Lost: the node is gone for good, without proof.
	Lost bool
	// RolledBackByNode: the node returned from the desired revision to its fallback, for Reason.
	RolledBackByNode bool
	// GaveUp: the member failed for a lasting reason, in two reports some time apart.
	GaveUp bool
}

// isTemporary reports whether a failure for this reason may end without a change of the instance: the owner admits the
// workload again, the agent is upgraded, credit is granted, the node reconnects. Such a failure is shown and never ends
// an instance.
func isTemporary(r protocol.WorkloadStatus_Reason) bool {
	switch r {
	case protocol.WorkloadStatus_OWNER_REFUSED, protocol.WorkloadStatus_FEATURE_MISSING,
		protocol.WorkloadStatus_LEASE_ENDED, protocol.WorkloadStatus_NODE_UNREACHABLE,
		protocol.WorkloadStatus_INSUFFICIENT_CAPACITY:
		return true
	default:
		return false
	}
}

// CanBecome reports whether the lifecycle has this edge (docs/design/overview.md).
func (s Status) CanBecome(next Status) bool {
	switch s {
	case Requested:
		return next == Deploying || next == Decommissioning || next == Failed
	case Deploying:
		return next == Running || next == Decommissioning || next == Failed
	case Running:
		return next == Upgrading || next == RollingBack || next == Stopping || next == Decommissioning || next == Failed
	case Upgrading:
		return next == Running || next == RollingBack || next == Decommissioning || next == Failed
	case RollingBack:
		return next == Running || next == Decommissioning || next == Failed
	case Stopping:
		return next == Stopped || next == Decommissioning || next == Failed
	case Stopped:
		return next == Deploying || next == Decommissioning || next == Failed
	case Failed:
		return next == Deploying || next == Upgrading || next == RollingBack || next == Decommissioning
	case Decommissioning:
		return next == Decommissioned
	case Decommissioned:
		return false
	}
	return false
}

// Ended reports whether the status is final.
func (s Status) Ended() bool { return s == Decommissioned }

// Desired reports whether nodes keep the members of an instance with this status, and whether without their containers.
// A failed instance is kept stopped: it is not retried for ever at the tenant's cost, and its port and volumes stay
// until it is decommissioned.
func (s Status) Desired() (present, stopped bool) {
	switch s {
	case Decommissioning, Decommissioned:
		return false, false
	case Failed, Stopping, Stopped:
		return true, true
	default:
		return true, false
	}
}

// Decommission begins the end. Every live status allows it.
func Decommission(l Lifecycle) (Lifecycle, Step, error) {
	if !l.Status.CanBecome(Decommissioning) {
		return l, Step{}, notOpen(l.Status, "is already "+string(l.Status)+
			"; there is nothing left to decommission.")
	}
	step := Step{From: l.Status, To: Decommissioning}
	return Lifecycle{Status: Decommissioning, Health: HealthUnknown}, step, nil
}

// History is what an action depends on besides the status.
type History struct {
	// Worked: some revision of the instance was ready once, so there is one to return to.
	Worked bool
	// Lost: the nodes of all members are gone for good.
	Lost bool
}

// Upgrade begins a change to another version. It is allowed while the instance runs, and after a failure once some
// revision worked.
func Upgrade(l Lifecycle, p History) (Lifecycle, Step, error) {
	return requestStatus(l, Upgrading, "upgraded", p)
}

// RollBack begins a return to an earlier version, under the same conditions.
func RollBack(l Lifecycle, p History) (Lifecycle, Step, error) {
	return requestStatus(l, RollingBack, "rolled back", p)
}

// Stop begins the end of the containers; allocation, ports and revision stay.
func Stop(l Lifecycle) (Lifecycle, Step, error) {
	return requestStatus(l, Stopping, "stopped", History{Worked: true})
}

// Start begins to run a stopped or failed instance again, also one that never ran.
func Start(l Lifecycle, p History) (Lifecycle, Step, error) {
	// A requested instance becomes deploying with the node's first report.
	if l.Status != Stopped && l.Status != Failed {
		return l, Step{}, notOpen(l.Status, "is "+string(l.Status)+" and cannot be started now.")
	}
	return requestStatus(l, Deploying, "started", History{Worked: true, Lost: p.Lost})
}

// ChangeSettings fails where name and configuration can change no more. It takes no step.
func ChangeSettings(l Lifecycle) error {
	if l.Status == Decommissioning || l.Status.Ended() {
		return notOpen(l.Status, "is "+string(l.Status)+" and cannot be changed any more.")
	}
	return nil
}

func requestStatus(l Lifecycle, next Status, done string, p History) (Lifecycle, Step, error) {
	if p.Lost {
		return l, Step{}, fault.New(fault.Conflict, codeNodeLost, "The node of the app instance is gone for "+
			"good; decommission it and deploy anew.", nil)
	}
	if l.Status == Upgrading && next == RollingBack {
		// Only the node takes this edge.
		return l, Step{}, notOpen(l.Status, "is "+string(l.Status)+" and cannot be "+done+" now.")
	}
	if l.Status == Failed && !p.Worked {
		return l, Step{}, fault.New(fault.Conflict, codeInstanceFailed,
			"The app instance has never been running; start it again, or decommission it.", nil)
	}
	if !l.Status.CanBecome(next) {
		return l, Step{}, notOpen(l.Status, "is "+string(l.Status)+" and cannot be "+done+" now.")
	}
	return Lifecycle{Status: next, Health: HealthUnknown}, Step{From: l.Status, To: next}, nil
}

// notOpen is the fault of an action that the status does not allow; each status has its own code.
func notOpen(s Status, public string) error {
	return fault.New(fault.Conflict, map[Status]fault.Code{
		Requested:       codeInstanceRequested,
		Deploying:       codeInstanceDeploying,
		Running:         codeInstanceRunning,
		Upgrading:       codeInstanceUpgrading,
		RollingBack:     codeInstanceRollingBack,
		Stopping:        codeInstanceStopping,
		Stopped:         codeInstanceStopped,
		Decommissioning: codeInstanceDecommissioning,
		Decommissioned:  codeInstanceDecommissioned,
		Failed:          codeInstanceFailed,
	}[s], "The app instance "+public, nil)
}

// Advance moves an instance by the current state of its members. It may take several steps at once, because a fast
// start may never be reported half-way. The same members again change nothing. After the step from upgrading to
// rolling_back it stops: the desired revision changes with it, and the caller advances again under that.
func Advance(l Lifecycle, members []MemberState) (Lifecycle, []Step) {
	var steps []Step
	for {
		next := advanceOnce(l, members)
		if next.Status == l.Status {
			return next, steps
		}
		step := Step{From: l.Status, To: next.Status, Reason: next.Reason}
		steps = append(steps, step)
		l = next
		if step.IsRollbackByNode() {
			return l, steps
		}
	}
}

// IsRollbackByNode reports whether the step is a node's return from a failed upgrade to its fallback.
func (s Step) IsRollbackByNode() bool { return s.From == Upgrading && s.To == RollingBack }

func advanceOnce(l Lifecycle, members []MemberState) Lifecycle {
	n := count(members)
	if n.total > 0 && n.lost == n.total && l.Status.CanBecome(Failed) {
		return Lifecycle{Status: Failed, Health: HealthUnhealthy, Reason: protocol.WorkloadStatus_NODE_LOST}
	}
	switch l.Status {
	case Requested:
		if n.reported > 0 {
			return Lifecycle{Status: Deploying, Health: HealthUnknown}
		}
		return Lifecycle{Status: Requested, Health: HealthUnknown, Reason: n.reason}
	case Upgrading:
		if n.rolledBack {
			return Lifecycle{Status: RollingBack, Health: HealthUnknown, Reason: n.rollbackReason}
		}
		return advanceStarting(l.Status, n)
	case Deploying, RollingBack:
		return advanceStarting(l.Status, n)
	case Stopping:
		if n.stopped+n.gone == n.total {
			return Lifecycle{Status: Stopped, Health: HealthUnknown}
		}
		l.Reason = 0
		if n.unreachable > 0 {
			l.Reason = protocol.WorkloadStatus_NODE_UNREACHABLE
		}
		return l
	case Running:
		return Lifecycle{Status: Running, Health: n.health(), Reason: n.reason}
	case Decommissioning:
		if n.gone == len(members) {
			end := Lifecycle{Status: Decommissioned, Health: HealthUnknown}
			if n.lost > 0 {
				end.Reason = protocol.WorkloadStatus_NODE_LOST
			}
			return end
		}
		l.Reason = 0
		if n.unreachable > 0 {
			l.Reason = protocol.WorkloadStatus_NODE_UNREACHABLE
		}
		return l
	default:
		return l
	}
}

// advanceStarting waits for the last member before it decides: a failed member beside a serving one is a matter of
// health. The instance fails only when every member gave up.
func advanceStarting(at Status, n counts) Lifecycle {
	switch {
	case n.waiting > 0 || n.total == 0 || n.serving == 0 && n.gaveUp < n.total:
		return Lifecycle{Status: at, Health: HealthUnknown, Reason: n.reason}
	case n.serving > 0:
		return Lifecycle{Status: Running, Health: n.health(), Reason: n.reason}
	default:
		reason := n.reason
		if reason == 0 {
			reason = protocol.WorkloadStatus_INTERNAL
		}
		return Lifecycle{Status: Failed, Health: HealthUnhealthy, Reason: reason}
	}
}

type counts struct {
	total, reported, ready, serving, waiting, stopped, unreachable, gone, lost, gaveUp int
	// reason of the first member that has one.
	reason protocol.WorkloadStatus_Reason
	// rolledBack: a node returned to its fallback, for rollbackReason.
	rolledBack     bool
	rollbackReason protocol.WorkloadStatus_Reason
}

func count(members []MemberState) counts {
	n := counts{total: len(members)}
	for _, m := range members {
		reason := m.Reason
		if m.Unreachable {
			n.unreachable++
			reason = protocol.WorkloadStatus_NODE_UNREACHABLE
		}
		if n.reason == 0 {
			n.reason = reason
		}
		if m.Gone {
			n.gone++
		}
		if m.Lost {
			n.lost++
		}
		if m.Lost || m.GaveUp {
			n.gaveUp++
		}
		if m.Status != 0 {
			n.reported++
		}
		if m.RolledBackByNode && !n.rolledBack {
			n.rolledBack, n.rollbackReason = true, m.Reason
			if n.rollbackReason == 0 {
				n.rollbackReason = protocol.WorkloadStatus_INTERNAL
			}
		}
		if m.Status == protocol.WorkloadStatus_STOPPED && !m.Unreachable && !m.Gone {
			n.stopped++
		}
		switch {
		case m.Unreachable:
			// Its last report may be outdated.
			n.waiting++
		case m.Status == protocol.WorkloadStatus_READY:
			n.ready++
			n.serving++
		case m.Status == protocol.WorkloadStatus_DEGRADED:
			n.serving++
		case m.Status != protocol.WorkloadStatus_FAILED:
			n.waiting++
		}
	}
	return n
}

func (n counts) health() Health {
	switch {
	case n.total == 0:
		return HealthUnknown
	case n.ready == n.total:
		return HealthHealthy
	case n.serving > 0:
		return HealthDegraded
	case n.unreachable == n.total:
		return HealthUnknown
	default:
		return HealthUnhealthy
	}
}

// EventType is the type of the step's event; the first event of an instance has no From. The type of a requested action
// ends in _requested. A node that rolls an upgrade back has failed at it first; rolled_back follows.
func (s Step) EventType() string {
	const prefix = "apps.instance."
	switch {
	case s.To == Decommissioning:
		return prefix + "decommission_requested"
	case s.To == Upgrading:
		return prefix + "upgrade_requested"
	case s.IsRollbackByNode():
		return prefix + "failed"
	case s.To == RollingBack:
		return prefix + "rollback_requested"
	case s.To == Stopping:
		return prefix + "stop_requested"
	case s.To == Deploying && s.From != Requested:
		return prefix + "start_requested"
	case s.From == Upgrading && s.To == Running:
		return prefix + "upgraded"
	case s.From == RollingBack && s.To == Running:
		return prefix + "rolled_back"
	default:
		return prefix + string(s.To)
	}
}

// Adopted is where an instance is that a node has such a document of; the node's report says how far it got.
func Adopted(w *protocol.Workload) Lifecycle {
	l := Lifecycle{Status: Deploying, Health: HealthUnknown}
	switch {
	case w.GetStopped():
		l.Status = Stopping
	case w.GetFallback() != nil:
		// Only an upgrade under way has one.
		l.Status = Upgrading
	}
	return l
}
