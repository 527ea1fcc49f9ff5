package command_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/protocol"
)

// law08CallsOfExternalWorkersAreOneTransaction breaks every statement of the calls about tasks.
func law08CallsOfExternalWorkersAreOneTransaction(t *testing.T) {
	// begun is a deploy task, claimed, of which so many phases were reported; none of an unclaimed one.
	call := func(begun int, do func(s *command.Service, ctx context.Context, m command.Meta, ref command.TaskRef,
		task instance.Task) (instance.Task, error),
	) func(w *world) func(commandtest.Around) error {
		return func(w *world) func(commandtest.Around) error {
			i, _ := w.cluster(1)
			task := w.tasks(i, lifecycle.TaskPending)[0]
			if begun >= 0 {
				task = w.next(i, "deploy")
			}
			for n := range begun {
				_, err := w.Commands().RenewTask(w.T.Context(), w.Meta(""), w.ref(task), task.Attempt, task.Phases[n], "")
				require.NoError(w.T, err)
			}
			return w.command(func(ctx context.Context, s *command.Service) error {
				return second(do(s, ctx, w.Meta(""), w.ref(task), task))
			})
		}
	}
	requireAtomic(t, []atomicStep{
		{"claim", "instance_tasks", call(-1, func(s *command.Service, ctx context.Context, m command.Meta,
			ref command.TaskRef, _ instance.Task,
		) (instance.Task, error) {
			return s.ClaimTask(ctx, m, ref, "a", time.Minute)
		})},
		{"phase", "instance_tasks", call(0, func(s *command.Service, ctx context.Context, m command.Meta,
			ref command.TaskRef, task instance.Task,
		) (instance.Task, error) {
			return s.RenewTask(ctx, m, ref, task.Attempt, task.Phases[0], "one of two")
		})},
		{"complete", "instance_tasks", call(2, func(s *command.Service, ctx context.Context, m command.Meta,
			ref command.TaskRef, task instance.Task,
		) (instance.Task, error) {
			return s.CompleteTask(ctx, m, ref, task.Attempt)
		})},
		{"fail", "instance_tasks", call(1, func(s *command.Service, ctx context.Context, m command.Meta,
			ref command.TaskRef, task instance.Task,
		) (instance.Task, error) {
			return s.FailTask(ctx, m, ref, task.Attempt, "environment_failed", "no package")
		})},
	})
	requireAtomic(t, otherCallsOfWorkers())
}

// otherCallsOfWorkers are those after an upgrade or a decommission.
func otherCallsOfWorkers() []atomicStep {
	return []atomicStep{
		{"fail an upgrade", "app_instances", func(w *world) func(commandtest.Around) error {
			i := w.runningCluster(1)
			w.upgradeCluster(i)
			task := w.next(i, "upgrade")
			return w.command(func(ctx context.Context, s *command.Service) error {
				return second(s.FailTask(ctx, w.Meta(""), w.ref(task), task.Attempt, "crash_loop", ""))
			})
		}},
		{"stop as asked", "instance_tasks", func(w *world) func(commandtest.Around) error {
			i, _ := w.cluster(1)
			task := w.next(i, "deploy")
			w.decommissioned(i)
			return w.command(func(ctx context.Context, s *command.Service) error {
				return second(s.FailTask(ctx, w.Meta(""), w.ref(task), task.Attempt, "internal", ""))
			})
		}},
		{"claim after one that nobody stopped", "instance_tasks", func(w *world) func(commandtest.Around) error {
			i, _ := w.cluster(1)
			w.next(i, "deploy")
			w.decommissioned(i)
			w.Now = w.Now.Add(time.Minute)
			end := w.tasks(i, lifecycle.TaskPending)[0]
			return w.command(func(ctx context.Context, s *command.Service) error {
				return second(s.ClaimTask(ctx, w.Meta(""), w.ref(end), "b", time.Minute))
			})
		}},
		{"end what no worker began", "app_instances", func(w *world) func(commandtest.Around) error {
			i, _ := w.cluster(1)
			m := w.Meta("end")
			return w.command(func(ctx context.Context, s *command.Service) error {
				return second(s.DecommissionInstance(ctx, m, i.ProjectID, i.ID))
			})
		}},
	}
}

// law08ChangesOfMembersAreOneTransaction does so for the members of an external worker's app.
func law08ChangesOfMembersAreOneTransaction(t *testing.T) {
	failed := func(w *world, i instance.Instance) instance.MemberReport {
		return instance.MemberReport{MemberID: i.Members[1].ID, Status: protocol.WorkloadStatus_FAILED, Detail: "gone"}
	}
	call := func(do func(s *command.Service, ctx context.Context, m command.Meta, i instance.Instance,
		spare string) (instance.Instance, error),
	) func(w *world) func(commandtest.Around) error {
		return func(w *world) func(commandtest.Around) error {
			i := w.runningCluster(2)
			spare, m := w.Allocation().ID, w.Meta("k")
			return w.command(func(ctx context.Context, s *command.Service) error { return second(do(s, ctx, m, i, spare)) })
		}
	}
	requireAtomic(t, []atomicStep{
		{"add", "instance_members", call(func(s *command.Service, ctx context.Context, m command.Meta, i instance.Instance,
			spare string,
		) (instance.Instance, error) {
			return s.AddMember(ctx, m, i.ProjectID, i.ID, spare, "worker")
		})},
		{"remove", "instance_members", call(func(s *command.Service, ctx context.Context, m command.Meta,
			i instance.Instance, _ string,
		) (instance.Instance, error) {
			return s.RemoveMember(ctx, m, i.ProjectID, i.ID, i.Members[1].ID)
		})},
		{"report", "instance_members", func(w *world) func(commandtest.Around) error {
			i := w.runningCluster(2)
			return w.command(func(ctx context.Context, s *command.Service) error {
				return second(s.ReportMember(ctx, w.Meta(""), i.ProjectID, i.ID, failed(w, i), "node_unreachable"))
			})
		}},
		{"recover", "instance_tasks", func(w *world) func(commandtest.Around) error {
			i := w.runningCluster(2)
			_, err := w.Commands().ReportMember(w.T.Context(), w.Meta(""), i.ProjectID, i.ID, failed(w, i), "node_unreachable")
			require.NoError(w.T, err)
			m := w.Meta("k")
			return w.command(func(ctx context.Context, s *command.Service) error {
				return second(s.RecoverMember(ctx, m, i.ProjectID, i.ID, i.Members[1].ID))
			})
		}},
	})
}

// TestLaw10AnotherOrgsTasksAndMembersAnswerAsIfAbsent compares the answers to foreign ids and to those that never were.
func TestLaw10AnotherOrgsTasksAndMembersAnswerAsIfAbsent(t *testing.T) {
	w := newWorld(t)
	i := w.runningCluster(2)
	spare := w.Allocation().ID
	_, err := w.addMember(i, spare, "add")
	require.NoError(t, err)
	task := w.tasks(i, lifecycle.TaskPending)[0]
	own, outsider := w.NewTenant("other")
	m := w.Meta("k")
	m.Principal = outsider
	s, before := w.Commands(), w.Contents()
	calls := func(project, instanceID, taskID, memberID string) []error {
		ref := command.TaskRef{ProjectID: project, InstanceID: instanceID, TaskID: taskID}
		return []error{
			second(s.ClaimTask(t.Context(), m, ref, "a", time.Minute)),
			second(s.RenewTask(t.Context(), m, ref, 1, "", "")),
			second(s.CompleteTask(t.Context(), m, ref, 1)),
			second(s.FailTask(t.Context(), m, ref, 1, "internal", "")),
			second(s.AddMember(t.Context(), m, project, instanceID, spare, "")),
			second(s.RemoveMember(t.Context(), m, project, instanceID, memberID)),
			second(s.RecoverMember(t.Context(), m, project, instanceID, memberID)),
			second(s.ReportMember(t.Context(), m, project, instanceID,
				instance.MemberReport{MemberID: memberID, Status: protocol.WorkloadStatus_READY}, "")),
		}
	}
	for _, project := range []string{w.Project.ID, own.ID} {
		foreign := calls(project, i.ID, task.ID, i.Members[1].ID)
		for n, absent := range calls(project, absentID, absentID, absentID) {
			require.EqualError(t, foreign[n], absent.Error(), "call %d", n)
		}
	}
	require.Equal(t, before, w.Contents())
}

// absentID is the id of nothing.
const absentID = "01890000-0000-7000-8000-000000000000"
