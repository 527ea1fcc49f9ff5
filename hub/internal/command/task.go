package command

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// TaskRef names a task.
type TaskRef struct {
	ProjectID, InstanceID, TaskID string
}

// ClaimTask gives a task to a worker for a lease, which each later call of the worker extends.
func (s *Service) ClaimTask(ctx context.Context, m Meta, ref TaskRef, worker string, lease time.Duration,
) (instance.Task, error) {
	return s.onTask(ctx, m, ref, func(tx db.Tx, i instance.Instance, t instance.Task) ([]instance.TaskChange, error) {
		return one(instance.ClaimTask(ctx, tx, i, t, m.Principal.Actor(), worker, lease, m.Now))
	})
}

// RenewTask extends the lease of a task; with a phase, the worker has begun that.
func (s *Service) RenewTask(ctx context.Context, m Meta, ref TaskRef, attempt int64, phase, detail string,
) (instance.Task, error) {
	return s.onTask(ctx, m, ref, func(tx db.Tx, i instance.Instance, t instance.Task) ([]instance.TaskChange, error) {
		return one(instance.RenewTask(ctx, tx, i, t, m.Principal.Actor(), attempt, phase, detail, m.Now))
	})
}

// CompleteTask ends a task with success; its instance moves on with it.
func (s *Service) CompleteTask(ctx context.Context, m Meta, ref TaskRef, attempt int64) (instance.Task, error) {
	return s.onTask(ctx, m, ref, func(tx db.Tx, i instance.Instance, t instance.Task) ([]instance.TaskChange, error) {
		return one(instance.CompleteTask(ctx, tx, i, t, m.Principal.Actor(), attempt, m.Now))
	})
}

// FailTask ends a task with a failure.
func (s *Service) FailTask(ctx context.Context, m Meta, ref TaskRef, attempt int64, reason, detail string,
) (instance.Task, error) {
	return s.onTask(ctx, m, ref, func(tx db.Tx, i instance.Instance, t instance.Task) ([]instance.TaskChange, error) {
		why, err := workerReason(reason)
		if err != nil {
			return nil, err
		}
		contract, err := change.WorkerContract(ctx, tx, i)
		if err != nil {
			return nil, err
		}
		return instance.FailTask(ctx, tx, i, t, m.Principal.Actor(), attempt, instance.TaskFailure{
			Reason: why, Detail: detail, Rollback: contract.Task(manifest.TaskRollback),
		}, m.Now)
	})
}

func workerReason(text string) (protocol.WorkloadStatus_Reason, error) {
	var why protocol.WorkloadStatus_Reason
	if err := why.UnmarshalText([]byte(text)); err != nil || !lifecycle.IsWorkerReason(why) {
		return 0, fault.New(fault.Unprocessable, codeReasonUnknown, "A worker cannot give this reason.", err).
			WithField("/reason", "is not a reason of the list").Permanent()
	}
	return why, nil
}

func one(c instance.TaskChange, err error) ([]instance.TaskChange, error) {
	return []instance.TaskChange{c}, err
}

// onTask runs a call of a worker. Its attempt makes it repeatable, so that it needs no idempotency key.
func (s *Service) onTask(ctx context.Context, m Meta, ref TaskRef,
	do func(tx db.Tx, i instance.Instance, t instance.Task) ([]instance.TaskChange, error),
) (instance.Task, error) {
	check := access.Instance(m.Principal, iam.InstanceWork, ref.ProjectID, ref.InstanceID)
	return run(ctx, s, check, func(tx db.Tx, project iam.Project) (instance.Task, error) {
		i, err := instance.Get(ctx, tx, project.ID, ref.InstanceID)
		if err != nil {
			return instance.Task{}, err
		}
		t, err := instance.GetTask(ctx, tx, i.ID, ref.TaskID)
		if err != nil {
			return instance.Task{}, err
		}
		changes, err := do(tx, i, t)
		if err != nil {
			return instance.Task{}, err
		}
		for _, c := range changes {
			if err := change.CompleteTask(ctx, tx, m.by(), iam.InstanceWork, c); err != nil {
				return instance.Task{}, err
			}
		}
		return changes[0].Task, nil
	})
}
