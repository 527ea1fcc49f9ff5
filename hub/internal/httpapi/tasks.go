package httpapi

import (
	"cmp"
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
)

// defaultLeaseSeconds is how long a worker holds a task without a sign of life.
const defaultLeaseSeconds = 60

// ListAppInstanceTasks lists the tasks of an instance, on request once there is one.
func (s *Server) ListAppInstanceTasks(ctx context.Context,
	r ListAppInstanceTasksRequestObject,
) (ListAppInstanceTasksResponseObject, error) {
	now := metaFrom(ctx).Now
	items, next, err := pageByID(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]instance.Task, error) {
		return s.Queries.Tasks(ctx, principalOf(ctx), r.ProjectID, instance.TaskFilter{
			InstanceID: r.AppInstanceID,
			State:      lifecycle.TaskState(r.Params.State),
			After:      p.After,
			Limit:      p.Limit,
			Now:        now,
		}, watchOf(0, r.Params.Wait))
	}, func(t instance.Task) string { return t.ID })
	return ListAppInstanceTasks200JSONResponse{
		Items: views(items, func(t instance.Task) Task { return taskView(t, now) }), NextCursor: next,
	}, err
}

// ClaimAppInstanceTask gives a task to a worker.
func (s *Server) ClaimAppInstanceTask(ctx context.Context,
	r ClaimAppInstanceTaskRequestObject,
) (ClaimAppInstanceTaskResponseObject, error) {
	lease := time.Duration(cmp.Or(r.Body.LeaseSeconds, defaultLeaseSeconds)) * time.Second
	t, err := s.Commands.ClaimTask(ctx, metaFrom(ctx), command.TaskRef{
		ProjectID: r.ProjectID, InstanceID: r.AppInstanceID, TaskID: r.TaskID,
	}, r.Body.Worker, lease)
	return ClaimAppInstanceTask200JSONResponse(taskView(t, metaFrom(ctx).Now)), err
}

// HeartbeatAppInstanceTask extends the lease of a task.
func (s *Server) HeartbeatAppInstanceTask(ctx context.Context,
	r HeartbeatAppInstanceTaskRequestObject,
) (HeartbeatAppInstanceTaskResponseObject, error) {
	t, err := s.Commands.RenewTask(ctx, metaFrom(ctx), command.TaskRef{
		ProjectID: r.ProjectID, InstanceID: r.AppInstanceID, TaskID: r.TaskID,
	}, r.Body.Attempt, "", "")
	return HeartbeatAppInstanceTask200JSONResponse(taskView(t, metaFrom(ctx).Now)), err
}

// ProgressAppInstanceTask records the phase of a task that begins.
func (s *Server) ProgressAppInstanceTask(ctx context.Context,
	r ProgressAppInstanceTaskRequestObject,
) (ProgressAppInstanceTaskResponseObject, error) {
	t, err := s.Commands.RenewTask(ctx, metaFrom(ctx), command.TaskRef{
		ProjectID: r.ProjectID, InstanceID: r.AppInstanceID, TaskID: r.TaskID,
	}, r.Body.Attempt, r.Body.Phase, r.Body.Detail)
	return ProgressAppInstanceTask200JSONResponse(taskView(t, metaFrom(ctx).Now)), err
}

// CompleteAppInstanceTask ends a task with success.
func (s *Server) CompleteAppInstanceTask(ctx context.Context,
	r CompleteAppInstanceTaskRequestObject,
) (CompleteAppInstanceTaskResponseObject, error) {
	t, err := s.Commands.CompleteTask(ctx, metaFrom(ctx), command.TaskRef{
		ProjectID: r.ProjectID, InstanceID: r.AppInstanceID, TaskID: r.TaskID,
	}, r.Body.Attempt)
	return CompleteAppInstanceTask200JSONResponse(taskView(t, metaFrom(ctx).Now)), err
}

// FailAppInstanceTask ends a task with a failure.
func (s *Server) FailAppInstanceTask(ctx context.Context,
	r FailAppInstanceTaskRequestObject,
) (FailAppInstanceTaskResponseObject, error) {
	t, err := s.Commands.FailTask(ctx, metaFrom(ctx), command.TaskRef{
		ProjectID: r.ProjectID, InstanceID: r.AppInstanceID, TaskID: r.TaskID,
	}, r.Body.Attempt, string(r.Body.Reason), r.Body.Detail)
	return FailAppInstanceTask200JSONResponse(taskView(t, metaFrom(ctx).Now)), err
}

func taskView(t instance.Task, now time.Time) Task {
	return Task{
		ID:              t.ID,
		AppInstanceID:   t.InstanceID,
		MemberID:        t.MemberID,
		Kind:            TaskKind(t.Kind),
		State:           TaskState(t.StateAt(now)),
		Revision:        t.Revision,
		Phases:          append([]string{}, t.Phases...),
		Phase:           t.Phase,
		Detail:          t.Detail,
		Reason:          StatusReason(t.Reason.Text()),
		Attempt:         t.Attempt,
		HeldBy:          actorView(t.HeldBy),
		LeaseExpiresAt:  t.LeaseExpiresAt,
		CancelRequested: t.CancelRequested,
		RequestedBy:     actorView(t.RequestedBy),
		CorrelationID:   t.CorrelationID,
		Traceparent:     t.Traceparent,
		CreatedAt:       t.CreatedAt,
		UpdatedAt:       t.UpdatedAt,
		EndedAt:         t.EndedAt,
	}
}

func actorView(a principal.Actor) RequestedBy {
	return RequestedBy{Type: RequestedByType(a.Type), ID: a.ID}
}
