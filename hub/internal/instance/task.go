package instance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/protocol"
)

// retryEnd is how long a failed end waits until a worker may try it again.
const retryEnd = 30 * time.Second

// Task is one thing that an external worker is to do for an instance.
type Task struct {
	ID         string
	InstanceID string
	// MemberID is empty for a task that concerns all members.
	MemberID string
	lifecycle.Task
	// Revision is the instance's once the task has succeeded.
	Revision int64
	Detail   string
	Reason   protocol.WorkloadStatus_Reason
	// HeldBy claimed the task last.
	HeldBy        principal.Actor
	RequestedBy   principal.Actor
	CorrelationID string
	// Traceparent is the W3C trace context of the request that the task follows from; empty where there was none.
	Traceparent string
	CreatedAt   time.Time
	UpdatedAt   time.Time
	EndedAt     time.Time
}

// TaskChange is what happened to a task, and to its instance with it. Event is empty where a call only renewed a lease,
// or was repeated; it is numbered as the last of the instance's resource versions.
type TaskChange struct {
	Change
	Task  Task
	Event string
}

// AddTask appends a task of a kind; nil is a kind that the worker does not know. The change is what led to it.
func AddTask(ctx context.Context, tx db.Tx, c Change, kind *manifest.TaskKind, memberID string, req Request,
	now time.Time,
) (TaskChange, error) {
	if kind == nil {
		return TaskChange{}, ErrTaskUnsupported()
	}
	t := Task{
		ID:            db.NewID(),
		InstanceID:    c.Instance.ID,
		MemberID:      memberID,
		Task:          lifecycle.Task{Kind: kind.Kind, State: lifecycle.TaskPending, Phases: kind.Phases},
		Revision:      c.Instance.Revision,
		RequestedBy:   req.By,
		CorrelationID: req.CorrelationID,
		Traceparent:   telemetry.Traceparent(ctx),
		CreatedAt:     now,
		UpdatedAt:     now,
	}
	if err := insertTask(ctx, tx, t); err != nil {
		return TaskChange{}, err
	}
	return TaskChange{Change: c, Task: t, Event: "apps.instance.task_requested"}.number(ctx, tx, now)
}

// ErrTaskUnsupported is the fault of an action that the external worker of a version does not know.
func ErrTaskUnsupported() error {
	return fault.New(fault.Conflict, codeTaskUnsupported, "The external worker of this version cannot do that: its "+
		"manifest names no such task.", nil)
}

// number gives the task's event the next number of its instance, so that readers who wait for the instance wake.
func (c TaskChange) number(ctx context.Context, tx db.Tx, now time.Time) (TaskChange, error) {
	var err error
	c.Instance, err = touch(ctx, tx, c.Instance, now)
	return c, err
}

// CancelTasks ends the tasks that no worker holds, and asks the worker of the other one to stop. It reports whether any
// worker ever began one.
func CancelTasks(ctx context.Context, tx db.Tx, instanceID string, now time.Time) (touched bool, err error) {
	if err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT 1 FROM instance_tasks WHERE instance_id = $1 AND attempt > 0)`,
		instanceID).Scan(&touched); err != nil {
		return false, err
	}
	// The worker of one whose lease has ended may be late: its next call answers that it has to stop, too.
	if err := tx.Queue(ctx, `UPDATE instance_tasks SET state = 'cancelled', cancel_requested = (state = 'claimed'),
			ended_at = $2, updated_at = $2
		WHERE instance_id = $1 AND (state = 'pending' OR state = 'claimed' AND lease_expires_at <= $2)`,
		instanceID, now); err != nil {
		return false, err
	}
	return touched, tx.Queue(ctx, `UPDATE instance_tasks SET cancel_requested = true, updated_at = $2
		WHERE instance_id = $1 AND state = 'claimed'`, instanceID, now)
}

// EndUntouched ends an instance that no worker has begun with: there is nothing to remove.
func EndUntouched(ctx context.Context, tx db.Tx, c Change, now time.Time) (Change, error) {
	members, removed, err := setMembers(ctx, tx, c.Instance.Members, now, removeMember)
	if err != nil {
		return Change{}, err
	}
	c.Instance.Members = members
	next, steps := lifecycle.Succeeded(c.Instance.Lifecycle, manifest.TaskDecommission)
	end, err := saveSteps(ctx, tx, c.Instance, next, steps, now)
	c.Instance, c.Steps, c.Removed = end.Instance, append(c.Steps, steps...), removed
	return c, err
}

// ClaimTask gives a task to a worker; name tells apart the workers of one principal.
func ClaimTask(ctx context.Context, tx db.Tx, i Instance, t Task, by principal.Actor, name string, lease time.Duration,
	now time.Time,
) (TaskChange, error) {
	open, err := openBefore(ctx, tx, t)
	if err != nil {
		return TaskChange{}, err
	}
	earlier := false
	for _, o := range open {
		if o.StateAt(now) != lifecycle.TaskCancelled {
			earlier = true
			continue
		}
		o.State, o.EndedAt, o.UpdatedAt = lifecycle.TaskCancelled, now, now
		if err := updateTask(ctx, tx, o); err != nil {
			return TaskChange{}, err
		}
	}
	next, err := t.Claim(by.ID+"/"+name, lease, earlier, now)
	if err != nil {
		return TaskChange{}, err
	}
	again := next.Attempt == t.Attempt
	t.Task, t.HeldBy, t.UpdatedAt = next, by, now
	if err := updateTask(ctx, tx, t); err != nil || again {
		return TaskChange{Change: Change{Instance: i}, Task: t}, err
	}
	l, steps := lifecycle.Claimed(i.Lifecycle, t.Kind)
	if i.Members, _, err = setMembers(ctx, tx, i.Members, now, func(m *Member) bool {
		starts := m.Status == protocol.WorkloadStatus_PENDING && (t.MemberID == "" || t.MemberID == m.ID)
		if starts {
			m.Status = protocol.WorkloadStatus_STARTING
		}
		return starts
	}); err != nil {
		return TaskChange{}, err
	}
	return move(ctx, tx, i, t, l, steps, nil, "claimed", now)
}

// openBefore returns the earlier tasks of the same instance that have no end yet.
func openBefore(ctx context.Context, tx db.Tx, t Task) ([]Task, error) {
	return selectTasks(ctx, tx, `WHERE instance_id = $1 AND ended_at IS NULL AND id < $2 ORDER BY id`, t.InstanceID, t.ID)
}

// MayClaim reports whether a worker may claim a pending task now: no earlier one of its instance is to be worked off
// first, and it has not failed just now.
func MayClaim(ctx context.Context, tx db.Tx, t Task, now time.Time) (bool, error) {
	open, err := openBefore(ctx, tx, t)
	earlier := slices.ContainsFunc(open, func(o Task) bool { return o.StateAt(now) != lifecycle.TaskCancelled })
	return !earlier && !now.Before(t.NotBefore), err
}

// held checks a call of the worker that holds a task; done says that it repeats one that has ended the task before.
func (t Task) held(by principal.Actor, attempt int64, end lifecycle.TaskState) (done bool, err error) {
	if by != t.HeldBy {
		attempt = -1 // no attempt of this caller
	}
	if t.Attempt == attempt && (t.State == end || t.State == lifecycle.TaskCancelled) {
		return true, nil
	}
	return false, t.Held(attempt)
}

// RenewTask extends the lease of the attempt that holds a task, and records the phase that it begins; an empty phase
// is only a heartbeat.
func RenewTask(ctx context.Context, tx db.Tx, i Instance, t Task, by principal.Actor, attempt int64, phase,
	detail string, now time.Time,
) (TaskChange, error) {
	same := TaskChange{Change: Change{Instance: i}, Task: t}
	if done, err := t.held(by, attempt, lifecycle.TaskCancelled); done || err != nil {
		return same, err
	}
	before := t.Phase
	var err error
	if phase != "" {
		if t.Task, err = t.Begin(phase); err != nil {
			return TaskChange{}, err
		}
		t.Detail = truncate(detail, maxDetailBytes)
	}
	t.Task, t.UpdatedAt = t.Renew(now), now
	same.Task = t
	if err := updateTask(ctx, tx, t); err != nil || t.Phase == before {
		return same, err
	}
	same.Event = "apps.instance.task_progressed"
	return same.number(ctx, tx, now)
}

// CompleteTask ends a task with success, and moves its instance and members in the same transaction. A task that was
// asked to stop ends as cancelled and moves nothing.
func CompleteTask(ctx context.Context, tx db.Tx, i Instance, t Task, by principal.Actor, attempt int64,
	now time.Time,
) (TaskChange, error) {
	if done, err := t.held(by, attempt, lifecycle.TaskSucceeded); done || err != nil {
		return TaskChange{Change: Change{Instance: i}, Task: t}, err
	}
	if t.CancelRequested {
		return cancelled(ctx, tx, i, t, now)
	}
	if err := t.Complete(); err != nil {
		return TaskChange{}, err
	}
	t.State, t.EndedAt, t.UpdatedAt, t.Reason, t.Detail = lifecycle.TaskSucceeded, now, now, 0, ""
	if err := updateTask(ctx, tx, t); err != nil {
		return TaskChange{}, err
	}
	members, removed, err := setMembers(ctx, tx, i.Members, now, afterTask(t, now))
	if err != nil {
		return TaskChange{}, err
	}
	i.Members = members
	l, steps := lifecycle.Succeeded(i.Lifecycle, t.Kind)
	return move(ctx, tx, i, t, l, steps, removed, "completed", now)
}

// afterTask is what the success of a task means for each member. It is also the worker's word about the members that it
// reports: during a task about all of them it cannot report.
func afterTask(t Task, now time.Time) func(*Member) bool {
	return func(m *Member) bool {
		reported := !m.HeartbeatAt.IsZero()
		if reported {
			m.HeartbeatAt = now
		}
		if t.MemberID != "" && t.MemberID != m.ID {
			return reported
		}
		switch t.Kind {
		case manifest.TaskDecommission, manifest.TaskMemberRemove:
			return removeMember(m)
		case manifest.TaskStop:
			m.Status = protocol.WorkloadStatus_STOPPED
			return true
		}
		// What the worker has reported of a member stands.
		if t.MemberID == "" &&
			(m.Status == protocol.WorkloadStatus_FAILED || m.Status == protocol.WorkloadStatus_DEGRADED) {
			return reported
		}
		m.Status, m.Reason, m.Detail = protocol.WorkloadStatus_READY, 0, ""
		return true
	}
}

func removeMember(m *Member) bool {
	m.Status, m.Reason, m.Detail, m.Gone = protocol.WorkloadStatus_REMOVED, 0, "", true
	return true
}

func cancelled(ctx context.Context, tx db.Tx, i Instance, t Task, now time.Time) (TaskChange, error) {
	t.State, t.EndedAt, t.UpdatedAt = lifecycle.TaskCancelled, now, now
	if err := updateTask(ctx, tx, t); err != nil {
		return TaskChange{}, err
	}
	c := TaskChange{Change: Change{Instance: i}, Task: t, Event: "apps.instance.task_cancelled"}
	return c.number(ctx, tx, now)
}

// TaskFailure is why a worker gives a task up.
type TaskFailure struct {
	Reason protocol.WorkloadStatus_Reason
	Detail string
	// Rollback is the kind of task that returns from a failed upgrade; nil where the worker knows none.
	Rollback *manifest.TaskKind
}

// FailTask ends a task with a failure. An upgrade returns to the revision before, by a task of its own; an end becomes
// pending again, because an instance cannot stay half removed.
func FailTask(ctx context.Context, tx db.Tx, i Instance, t Task, by principal.Actor, attempt int64, f TaskFailure,
	now time.Time,
) ([]TaskChange, error) {
	retried := t.State == lifecycle.TaskPending && t.Attempt == attempt && t.HeldBy == by && t.Reason != 0
	if done, err := t.held(by, attempt, lifecycle.TaskFailed); done || retried || err != nil {
		if retried {
			err = nil
		}
		return []TaskChange{{Change: Change{Instance: i}, Task: t}}, err
	}
	if t.CancelRequested {
		c, err := cancelled(ctx, tx, i, t, now)
		return []TaskChange{c}, err
	}
	t.State, t.Reason, t.Detail, t.UpdatedAt = lifecycle.TaskFailed, f.Reason, truncate(f.Detail, maxDetailBytes), now
	if t.Kind == manifest.TaskDecommission {
		t.State, t.NotBefore = lifecycle.TaskPending, now.Add(retryEnd)
	} else {
		t.EndedAt = now
	}
	if err := updateTask(ctx, tx, t); err != nil {
		return nil, err
	}
	var err error
	if i.Members, _, err = setMembers(ctx, tx, i.Members, now, func(m *Member) bool {
		if t.MemberID != m.ID {
			return false
		}
		m.Status, m.Reason, m.Detail = protocol.WorkloadStatus_FAILED, t.Reason, t.Detail
		return true
	}); err != nil {
		return nil, err
	}
	revisions, err := selectRevisions(ctx, tx, i.ID)
	if err != nil {
		return nil, err
	}
	back := revisions.Find(i.Revision).Fallback
	l, steps := lifecycle.TaskFailure(i.Lifecycle, t.Kind, f.Reason, back != 0 && f.Rollback != nil)
	c, err := move(ctx, tx, i, t, l, steps, nil, "failed", now)
	if err != nil || l.Status != lifecycle.RollingBack || len(steps) == 0 {
		return []TaskChange{c}, err
	}
	returns, err := returnTo(ctx, tx, c.Instance, back, f.Rollback, now)
	return []TaskChange{c, returns}, err
}

// returnTo makes a revision the desired one again, and adds the task for it.
func returnTo(ctx context.Context, tx db.Tx, i Instance, revision int64, kind *manifest.TaskKind, now time.Time,
) (TaskChange, error) {
	i.Revision = revision
	if err := updateInstance(ctx, tx, i); err != nil {
		return TaskChange{}, err
	}
	if err := supersede(ctx, tx, i.ID, revision, now); err != nil {
		return TaskChange{}, err
	}
	// The revision has another version.
	i, err := Get(ctx, tx, i.ProjectID, i.ID)
	if err != nil {
		return TaskChange{}, err
	}
	req := Request{By: i.Operation.By, CorrelationID: i.Operation.CorrelationID}
	// It follows from the upgrade, and not from the worker that reports its failure.
	ctx = telemetry.Continue(ctx, i.Operation.Traceparent)
	return AddTask(ctx, tx, Change{Instance: i}, kind, "", req, now)
}

// move saves what a task did to its instance, and numbers the task's event.
func move(ctx context.Context, tx db.Tx, i Instance, t Task, l lifecycle.Lifecycle, steps []lifecycle.Step,
	removed []Removal, event string, now time.Time,
) (TaskChange, error) {
	c, err := saveUnnumbered(ctx, tx, i, l, steps, now)
	if err != nil {
		return TaskChange{}, err
	}
	c.Removed = removed
	return TaskChange{Change: c, Task: t, Event: "apps.instance.task_" + event}.number(ctx, tx, now)
}

// saveUnnumbered applies the lifecycle to the members, and saves the steps. The caller numbers one more event, also
// where there is no step and only the health is another.
func saveUnnumbered(ctx context.Context, tx db.Tx, i Instance, l lifecycle.Lifecycle, steps []lifecycle.Step,
	now time.Time,
) (Change, error) {
	l, more := i.advance(l)
	steps = append(steps, more...)
	c, err := saveSteps(ctx, tx, i, l, steps, now)
	c.Instance.ResourceVersion = i.ResourceVersion + int64(len(steps))
	return c, err
}

// setMembers saves the members that set changes, and returns all of them, with those that it removed.
func setMembers(ctx context.Context, tx db.Tx, members []Member, now time.Time, set func(*Member) bool,
) (all []Member, removed []Removal, err error) {
	for _, m := range members {
		if !m.Gone && set(&m) {
			var removal *Removal
			if m.Status == protocol.WorkloadStatus_READY && m.ReadyAt.IsZero() {
				m.ReadyAt = now
			}
			if m.Gone {
				m.RemovedAt = now
				removal = &Removal{Member: m}
				removed = append(removed, *removal)
			}
			if err := updateMember(ctx, tx, m, removal, now); err != nil {
				return nil, nil, err
			}
		}
		all = append(all, m)
	}
	return all, removed, nil
}

// TaskFilter selects a page of an instance's tasks, the oldest first; After is the last id of the page before.
type TaskFilter struct {
	InstanceID string
	State      lifecycle.TaskState
	After      string
	Limit      int
	Now        time.Time
}

// Tasks returns a page of an instance's tasks. One whose lease has ended is pending, or cancelled.
func Tasks(ctx context.Context, tx db.Tx, f TaskFilter) ([]Task, error) {
	var w db.Where
	w.And("l.instance_id = " + w.Arg(f.InstanceID))
	w.Compare("l.id >", f.After)
	if f.State != "" {
		now, state := w.Arg(f.Now), w.Arg(string(f.State))
		w.And(`(CASE WHEN l.state <> 'claimed' OR l.lease_expires_at > ` + now + ` THEN l.state
			WHEN l.cancel_requested THEN 'cancelled' ELSE 'pending' END) = ` + state)
	}
	limit := w.Arg(f.Limit)
	tasks, err := selectTasks(ctx, tx,
		`WHERE id IN (SELECT l.id FROM instance_tasks l`+w.SQL()+` ORDER BY l.id LIMIT `+limit+`) ORDER BY id`, w.Args...)
	for n := range tasks {
		tasks[n].State = tasks[n].StateAt(f.Now)
	}
	return tasks, err
}

// GetTask returns a task of an instance.
func GetTask(ctx context.Context, tx db.Tx, instanceID, id string) (Task, error) {
	var list []Task
	var err error
	if db.IsID(id) {
		list, err = selectTasks(ctx, tx, `WHERE instance_id = $1 AND id = $2`, instanceID, id)
	}
	if err == nil && len(list) == 0 {
		err = fault.New(fault.NotFound, fault.CodeNotFound, "The app instance has no such task.", nil)
	}
	if err != nil {
		return Task{}, err
	}
	return list[0], nil
}

func insertTask(ctx context.Context, tx db.Tx, t Task) error {
	phases, err := json.Marshal(orEmpty(t.Phases))
	if err != nil {
		return err
	}
	return tx.Queue(ctx, `INSERT INTO instance_tasks (id, instance_id, member_id, kind, revision, phases, state,
			requested_by_type, requested_by_id, correlation_id, traceparent, created_at, updated_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $12)`,
		t.ID, t.InstanceID, zeronull.Text(t.MemberID), t.Kind, t.Revision, phases, string(t.State), t.RequestedBy.Type,
		t.RequestedBy.ID, t.CorrelationID, t.Traceparent, t.CreatedAt)
}

func updateTask(ctx context.Context, tx db.Tx, t Task) error {
	return tx.Queue(ctx, `UPDATE instance_tasks SET phase = $2, detail = $3, state = $4, status_reason = $5, attempt = $6,
			worker = $7, held_by_type = $8, held_by_id = $9, lease_ms = $10, lease_expires_at = $11, not_before = $12,
			updated_at = $13, ended_at = $14 WHERE id = $1`,
		t.ID, t.Phase, t.Detail, string(t.State), t.Reason.Text(), t.Attempt, t.Worker, t.HeldBy.Type, t.HeldBy.ID,
		t.Lease.Milliseconds(), zeronull.Timestamptz(t.LeaseExpiresAt), zeronull.Timestamptz(t.NotBefore), t.UpdatedAt,
		zeronull.Timestamptz(t.EndedAt))
}

func selectTasks(ctx context.Context, tx db.Tx, where string, args ...any) ([]Task, error) {
	return db.Select(ctx, tx, scanTask, `SELECT id, instance_id, member_id, kind, revision, phases, phase, detail, state,
			status_reason, attempt, worker, held_by_type, held_by_id, lease_ms, lease_expires_at, not_before,
			cancel_requested, requested_by_type, requested_by_id, correlation_id, traceparent, created_at,
			updated_at, ended_at
		FROM instance_tasks `+where, args...)
}

func scanTask(row pgx.CollectableRow) (t Task, err error) {
	var phases []byte
	var leaseMillis int64
	err = row.Scan(&t.ID, &t.InstanceID, (*zeronull.Text)(&t.MemberID), &t.Kind, &t.Revision, &phases, &t.Phase, &t.Detail,
		&t.State, textColumn{&t.Reason}, &t.Attempt, &t.Worker, &t.HeldBy.Type, &t.HeldBy.ID, &leaseMillis,
		(*zeronull.Timestamptz)(&t.LeaseExpiresAt), (*zeronull.Timestamptz)(&t.NotBefore), &t.CancelRequested,
		&t.RequestedBy.Type, &t.RequestedBy.ID, &t.CorrelationID, &t.Traceparent, &t.CreatedAt, &t.UpdatedAt,
		(*zeronull.Timestamptz)(&t.EndedAt))
	if err = errors.Join(err, json.Unmarshal(phases, &t.Phases)); err != nil {
		return t, fmt.Errorf("task %s: %w", t.ID, err)
	}
	t.Lease = time.Duration(leaseMillis) * time.Millisecond
	return t, nil
}
