package lifecycle

import (
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// TaskState is where a task of an external worker is.
type TaskState string

// The states of a task. A claimed one whose lease has ended is pending again, or cancelled.
const (
	TaskPending   TaskState = "pending"
	TaskClaimed   TaskState = "claimed"
	TaskSucceeded TaskState = "succeeded"
	TaskFailed    TaskState = "failed"
	TaskCancelled TaskState = "cancelled"
)

// Ended reports whether the state is final.
func (s TaskState) Ended() bool { return s != TaskPending && s != TaskClaimed }

// Task is what decides about a task of an external worker.
type Task struct {
	Kind   string
	State  TaskState
	Phases []string
	// Phase is the last one that the worker of this attempt has begun; empty before the first.
	Phase string
	// Attempt grows with each claim by another worker: it fences off those before.
	Attempt int64
	Worker  string
	// Lease is how long each call of the worker keeps the task; LeaseExpiresAt is when it passes on.
	Lease          time.Duration
	LeaseExpiresAt time.Time
	// NotBefore is when a task that failed and is to be tried again may be claimed.
	NotBefore       time.Time
	CancelRequested bool
}

// StateAt is the state with the end of the lease taken into account.
func (t Task) StateAt(now time.Time) TaskState {
	switch {
	case t.State != TaskClaimed || now.Before(t.LeaseExpiresAt):
		return t.State
	case t.CancelRequested:
		return TaskCancelled
	default:
		return TaskPending
	}
}

// Claim gives the task to a worker for a lease. Asked again by the same worker, it answers the same attempt, so that a
// lost answer costs nothing. Earlier says that an earlier task of the instance has not ended.
func (t Task) Claim(worker string, lease time.Duration, earlier bool, now time.Time) (Task, error) {
	state := t.StateAt(now)
	switch {
	case state.Ended():
		return t, fault.New(fault.Conflict, codeTaskEnded, "The task has ended.", nil)
	case state == TaskClaimed && t.Worker != worker:
		return t, fault.New(fault.Conflict, codeTaskHeld, "Another worker holds the task; its lease has not ended.", nil)
	case earlier || now.Before(t.NotBefore):
		return t, fault.New(fault.Conflict, codeTaskWaits, "The task cannot begin yet: an earlier one of the app instance "+
			"has not ended, or it has failed just now.", nil)
	}
	if state != TaskClaimed {
		t.Attempt, t.Phase = t.Attempt+1, ""
	}
	t.State, t.Worker, t.Lease, t.LeaseExpiresAt = TaskClaimed, worker, lease, now.Add(lease)
	return t, nil
}

// Held checks that a call comes from the attempt that holds the task. A worker that is late but was not replaced still
// holds it.
func (t Task) Held(attempt int64) error {
	switch {
	case t.Attempt != attempt || t.State == TaskPending:
		return fault.New(fault.Conflict, codeTaskFenced, "Another attempt holds the task, or none; what this one did "+
			"afterwards does not count.", nil).WithField("/attempt", "is not the current attempt")
	case t.State.Ended():
		return fault.New(fault.Conflict, codeTaskEnded, "The task has ended.", nil)
	}
	return nil
}

// Renew extends the lease of the attempt that holds the task.
func (t Task) Renew(now time.Time) Task {
	t.LeaseExpiresAt = now.Add(t.Lease)
	return t
}

// Begin records the phase that the worker is in: the same, or the next one.
func (t Task) Begin(phase string) (Task, error) {
	at, next := slices.Index(t.Phases, t.Phase), slices.Index(t.Phases, phase)
	if next < 0 || next != at && next != at+1 {
		return t, fault.New(fault.Conflict, codeTaskPhaseOrder, "Phases are reported one after the other, in the order of "+
			"the manifest.", nil).WithField("/phase", "is not the phase that follows")
	}
	t.Phase = phase
	return t, nil
}

// Complete checks that the worker has reported every phase.
func (t Task) Complete() error {
	if n := len(t.Phases); n > 0 && t.Phase != t.Phases[n-1] {
		return fault.New(fault.Conflict, codeTaskPhaseOrder, "The task has phases that the worker has not reported.", nil)
	}
	return nil
}

// Claimed is the lifecycle once a worker has begun with a task.
func Claimed(l Lifecycle, kind string) (Lifecycle, []Step) {
	if l.Status != Requested || kind != manifest.TaskDeploy {
		return l, nil
	}
	return Lifecycle{Status: Deploying, Health: HealthUnknown}, []Step{{From: Requested, To: Deploying}}
}

// ChangeMembers fails where an instance of an external worker cannot change its members.
func ChangeMembers(l Lifecycle) error {
	if l.Status != Running {
		return notOpen(l.Status, "is "+string(l.Status)+", and its members cannot change now.")
	}
	return nil
}

// waitsFor is the status in which an instance waits for a kind of task, and the one that its success leads to.
func waitsFor(kind string) (while []Status, to Status) {
	switch kind {
	case manifest.TaskDeploy, manifest.TaskStart:
		return []Status{Deploying}, Running
	case manifest.TaskUpgrade:
		return []Status{Upgrading}, Running
	case manifest.TaskRollback:
		return []Status{RollingBack}, Running
	case manifest.TaskStop:
		return []Status{Stopping}, Stopped
	case manifest.TaskDecommission:
		return []Status{Decommissioning}, Decommissioned
	default:
		return nil, ""
	}
}

// Succeeded is the lifecycle after a task.
func Succeeded(l Lifecycle, kind string) (Lifecycle, []Step) {
	while, to := waitsFor(kind)
	if !slices.Contains(while, l.Status) {
		return l, nil
	}
	return Lifecycle{Status: to, Health: HealthUnknown}, []Step{{From: l.Status, To: to}}
}

// TaskFailure is the lifecycle after a task that failed. An upgrade returns to the version before where canReturn; an
// end is tried again.
func TaskFailure(l Lifecycle, kind string, reason protocol.WorkloadStatus_Reason, canReturn bool) (Lifecycle, []Step) {
	while, _ := waitsFor(kind)
	if !slices.Contains(while, l.Status) {
		return l, nil
	}
	next := Lifecycle{Status: Failed, Health: HealthUnhealthy, Reason: reason}
	switch {
	case l.Status == Decommissioning:
		l.Reason = reason
		return l, nil
	case l.Status == Upgrading && canReturn:
		next = Lifecycle{Status: RollingBack, Health: HealthUnknown, Reason: reason}
	}
	return next, []Step{{From: l.Status, To: next.Status, Reason: reason}}
}

// AdvanceExternal is Advance for an instance that an external worker operates: its tasks move the status, and the
// members that it reports decide about health. Members that come, go or are gone do not count there. A lost one does
// where its component has no member any more; the loss of the last member ends the instance.
func AdvanceExternal(l Lifecycle, members []MemberState) (Lifecycle, []Step) {
	present := map[string]bool{}
	lost, live := false, false
	for _, m := range members {
		present[m.Role] = present[m.Role] || !m.Gone
		lost, live = lost || m.Lost, live || !m.Gone
	}
	switch {
	case lost && !live && l.Status.CanBecome(Failed):
		next := Lifecycle{Status: Failed, Health: HealthUnhealthy, Reason: protocol.WorkloadStatus_NODE_LOST}
		return next, []Step{{From: l.Status, To: Failed, Reason: next.Reason}}
	case l.Status == Running:
		n := count(slices.DeleteFunc(slices.Clone(members), func(m MemberState) bool {
			return !m.decidesHealth() || m.Lost && present[m.Role]
		}))
		return Lifecycle{Status: Running, Health: n.health(), Reason: n.reason}, nil
	}
	return l, nil
}

// decidesHealth reports whether the member of an external worker serves, or should.
func (m MemberState) decidesHealth() bool {
	switch m.Status {
	case protocol.WorkloadStatus_READY, protocol.WorkloadStatus_DEGRADED, protocol.WorkloadStatus_FAILED:
		return true
	default:
		return false
	}
}

// IsWorkerReason reports whether a worker may give the reason for a failure.
func IsWorkerReason(r protocol.WorkloadStatus_Reason) bool {
	switch r {
	case protocol.WorkloadStatus_IMAGE_PULL_FAILED, protocol.WorkloadStatus_INSUFFICIENT_CAPACITY,
		protocol.WorkloadStatus_READINESS_TIMEOUT, protocol.WorkloadStatus_CRASH_LOOP,
		protocol.WorkloadStatus_OUT_OF_MEMORY, protocol.WorkloadStatus_DISK_LIMIT,
		protocol.WorkloadStatus_DEVICE_FAULT, protocol.WorkloadStatus_NODE_UNREACHABLE,
		protocol.WorkloadStatus_SECRET_UNREADABLE, protocol.WorkloadStatus_ENVIRONMENT_FAILED,
		protocol.WorkloadStatus_INTERNAL:
		return true
	default:
		return false
	}
}
