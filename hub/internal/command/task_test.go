package command_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/periodic"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest/manifesttest"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/protocol"
)

// publishCluster publishes an app that an external worker operates.
func (w *world) publishCluster(version string) {
	w.T.Helper()
	w.PublishWorker(strings.Replace(manifesttest.External("cluster"), "version: 1.0.0", "version: "+version, 1))
}

// cluster asks for an instance on so many allocations of its own.
func (w *world) cluster(members int) (instance.Instance, []capacity.Allocation) {
	w.T.Helper()
	w.publishCluster("1.0.0")
	return w.launchCluster("cluster", members)
}

// launchCluster does so for the version that is published, under an idempotency key.
func (w *world) launchCluster(key string, members int) (instance.Instance, []capacity.Allocation) {
	w.T.Helper()
	in := command.CreateInstanceInput{
		ProjectID: w.Project.ID, AppSlug: "cluster", Version: "1.0.0", DisplayName: "c",
		Parameters: map[string]any{"partition": "main"},
	}
	var allocations []capacity.Allocation
	for range members {
		a := w.Allocation()
		allocations = append(allocations, a)
		in.AllocationIDs = append(in.AllocationIDs, a.ID)
	}
	i, err := w.Commands().CreateInstance(w.T.Context(), w.Meta(key), in)
	require.NoError(w.T, err)
	return i, allocations
}

// pending returns the tasks of a state.
func (w *world) tasks(i instance.Instance, state lifecycle.TaskState) (list []instance.Task) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) (err error) {
		list, err = instance.Tasks(ctx, tx, instance.TaskFilter{InstanceID: i.ID, State: state, Limit: 10, Now: w.Now})
		return err
	})
	return list
}

func (w *world) ref(t instance.Task) command.TaskRef {
	return command.TaskRef{ProjectID: w.Project.ID, InstanceID: t.InstanceID, TaskID: t.ID}
}

func (w *world) claim(t instance.Task, worker string) (instance.Task, error) {
	return w.Commands().ClaimTask(w.T.Context(), w.Meta(""), w.ref(t), worker, time.Minute)
}

// next claims the first pending task.
func (w *world) next(i instance.Instance, kind string) instance.Task {
	w.T.Helper()
	list := w.tasks(i, lifecycle.TaskPending)
	require.NotEmpty(w.T, list)
	require.Equal(w.T, kind, list[0].Kind)
	t, err := w.claim(list[0], "a")
	require.NoError(w.T, err)
	return t
}

// finish reports every phase of a task, and completes it.
func (w *world) finish(t instance.Task) {
	w.T.Helper()
	s := w.Commands()
	for _, phase := range t.Phases {
		_, err := s.RenewTask(w.T.Context(), w.Meta(""), w.ref(t), t.Attempt, phase, "")
		require.NoError(w.T, err)
	}
	for range 2 {
		done, err := s.CompleteTask(w.T.Context(), w.Meta(""), w.ref(t), t.Attempt)
		require.NoError(w.T, err, "a repeated call gets the same answer")
		require.Equal(w.T, lifecycle.TaskSucceeded, done.State)
	}
}

// runningCluster has been deployed by a worker.
func (w *world) runningCluster(members int) instance.Instance {
	w.T.Helper()
	i, _ := w.cluster(members)
	w.finish(w.next(i, "deploy"))
	return w.Get(i.ID)
}

// Where the wallet no longer covers an allocation, the worker gets the task to end what it operates there, or nothing
// is left to end; until then the allocation costs what nobody pays.
func TestAnUnpaidAllocationEndsWithWhatAWorkerOperatesThere(t *testing.T) {
	w := newWorld(t)
	unpaid := func(i instance.Instance) {
		w.Tx(func(ctx context.Context, tx db.Tx) error {
			return periodic.ReleaseUnpaid(ctx, tx, i.Members[0].AllocationID, "corr", w.Now)
		})
	}
	running := w.runningCluster(2)
	_, err := w.Commands().StopInstance(t.Context(), w.Meta("stop"), w.Project.ID, running.ID)
	require.NoError(t, err)
	unpaid(running)
	w.finish(w.next(running, "decommission"))
	require.Empty(t, w.tasks(running, lifecycle.TaskPending), "the task before is cancelled")
	untouched, _ := w.launchCluster("untouched", 2)
	unpaid(untouched)
	for _, i := range []instance.Instance{running, untouched} {
		require.Equal(t, lifecycle.Decommissioned, w.Get(i.ID).Lifecycle.Status)
		require.Equal(t, 1, w.Count(`SELECT count(*) FROM allocations WHERE id = $1 AND status = 'released'`,
			i.Members[0].AllocationID))
	}
}

func TestTasksMoveAnInstanceThroughItsLife(t *testing.T) {
	w := newWorld(t)
	_, held := w.Wallet()
	i, _ := w.cluster(2)
	require.Equal(t, lifecycle.Requested, i.Lifecycle.Status)
	require.Equal(t, []string{"controller", "worker"}, []string{i.Members[0].Role, i.Members[1].Role})
	_, heldNow := w.Wallet()
	require.Equal(t, held, heldNow, "only allocations are billed")
	require.Empty(t, w.Enqueued, "no node has anything to do")
	deploy := w.next(i, "deploy")
	require.Equal(t, lifecycle.Deploying, w.Get(i.ID).Lifecycle.Status)
	w.finish(deploy)
	i = w.Get(i.ID)
	require.Equal(t, lifecycle.Lifecycle{Status: lifecycle.Running, Health: lifecycle.HealthHealthy}, i.Lifecycle)
	require.Equal(t, protocol.WorkloadStatus_READY, i.Members[1].Status)

	s := w.Commands()
	_, err := s.StopInstance(t.Context(), w.Meta("stop"), w.Project.ID, i.ID)
	require.NoError(t, err)
	w.finish(w.next(i, "stop"))
	require.Equal(t, lifecycle.Stopped, w.Get(i.ID).Lifecycle.Status)
	_, err = s.StartInstance(t.Context(), w.Meta("start"), w.Project.ID, i.ID)
	require.NoError(t, err)
	w.finish(w.next(i, "deploy"))
	require.Equal(t, lifecycle.HealthHealthy, w.Get(i.ID).Lifecycle.Health)

	w.publishCluster("2.0.0")
	_, err = s.UpgradeInstance(t.Context(), w.Meta("up"), command.UpgradeInstanceInput{
		ProjectID: w.Project.ID, InstanceID: i.ID, Version: "2.0.0",
	})
	require.NoError(t, err)
	w.finish(w.next(i, "upgrade"))
	require.Equal(t, "2.0.0", w.Get(i.ID).Version)
	_, err = s.RollbackInstance(t.Context(), w.Meta("back"), w.Project.ID, i.ID, "")
	require.NoError(t, err)
	w.finish(w.next(i, "rollback"))
	require.Equal(t, "1.0.0", w.Get(i.ID).Version)

	_, err = s.DecommissionInstance(t.Context(), w.Meta("end"), w.Project.ID, i.ID)
	require.NoError(t, err)
	w.finish(w.next(i, "decommission"))
	i = w.Get(i.ID)
	require.Equal(t, lifecycle.Decommissioned, i.Lifecycle.Status)
	require.True(t, i.Members[0].Gone)
	var steps []string
	for _, name := range w.EventTypes(i.ID) {
		if !strings.Contains(name, ".task_") {
			steps = append(steps, strings.TrimPrefix(name, "apps.instance."))
		}
	}
	require.Equal(t, []string{
		"requested", "deploying", "running", "stop_requested", "stopped", "start_requested", "running", "upgrade_requested",
		"upgraded", "rollback_requested", "rolled_back", "decommission_requested", "decommissioned",
	}, steps)
}

func TestOneOfTwoWorkersGetsTheTask(t *testing.T) {
	w := newWorld(t)
	i, _ := w.cluster(1)
	task := w.tasks(i, lifecycle.TaskPending)[0]
	var (
		group sync.WaitGroup
		errs  [2]error
	)
	for n, name := range []string{"a", "b"} {
		group.Go(func() { _, errs[n] = w.claim(task, name) })
	}
	group.Wait()
	winner := "a"
	if errs[0] != nil {
		winner, errs[0], errs[1] = "b", errs[1], errs[0]
	}
	require.NoError(t, errs[0])
	require.EqualValues(t, "task_held", fault.As(errs[1]).Code, "%v", errs[1])
	again, err := w.claim(task, winner)
	require.NoError(t, err, "the answer was lost")
	require.EqualValues(t, 1, again.Attempt)
	require.Empty(t, w.tasks(i, lifecycle.TaskPending))
}

func TestTheTaskOfADeadWorkerPassesOnAndItsFenceHolds(t *testing.T) {
	w := newWorld(t)
	i, _ := w.cluster(1)
	dead := w.next(i, "deploy")
	s := w.Commands()
	_, err := s.RenewTask(t.Context(), w.Meta(""), w.ref(dead), dead.Attempt, "install", "")
	require.NoError(t, err)
	w.Now = w.Now.Add(time.Minute)
	next := w.tasks(i, lifecycle.TaskPending)
	require.Len(t, next, 1)
	require.Equal(t, lifecycle.TaskPending, next[0].State)
	heir, err := w.claim(next[0], "b")
	require.NoError(t, err)
	require.EqualValues(t, 2, heir.Attempt)
	require.Empty(t, heir.Phase, "the new attempt begins with the first phase")

	before := w.Contents()
	_, err = s.CompleteTask(t.Context(), w.Meta(""), w.ref(dead), dead.Attempt)
	require.EqualValues(t, "task_fenced", fault.As(err).Code, "%v", err)
	_, err = s.RenewTask(t.Context(), w.Meta(""), w.ref(dead), dead.Attempt, "", "")
	require.EqualValues(t, "task_fenced", fault.As(err).Code, "%v", err)
	_, err = s.FailTask(t.Context(), w.Meta(""), w.ref(dead), dead.Attempt, "internal", "")
	require.EqualValues(t, "task_fenced", fault.As(err).Code, "%v", err)
	other := w.Meta("")
	other.Principal.ID, other.Principal.Type = db.NewID(), principal.User
	_, err = s.CompleteTask(t.Context(), other, w.ref(heir), heir.Attempt)
	require.EqualValues(t, "task_fenced", fault.As(err).Code, "another caller knows the attempt")
	require.Equal(t, before, w.Contents())
	w.finish(heir)
	require.Equal(t, lifecycle.Running, w.Get(i.ID).Lifecycle.Status)

	_, err = s.CompleteTask(t.Context(), w.Meta(""), w.ref(dead), dead.Attempt)
	require.EqualValues(t, "task_fenced", fault.As(err).Code, "%v", err)
	_, err = s.RenewTask(t.Context(), w.Meta(""), w.ref(heir), heir.Attempt, "", "")
	require.EqualValues(t, "task_ended", fault.As(err).Code, "%v", err)
	_, err = s.FailTask(t.Context(), w.Meta(""), w.ref(heir), heir.Attempt, "internal", "")
	require.EqualValues(t, "task_ended", fault.As(err).Code, "%v", err)
}

func TestPhasesAreReportedInOrderAndAllOfThem(t *testing.T) {
	w := newWorld(t)
	i, _ := w.cluster(1)
	task := w.next(i, "deploy")
	s := w.Commands()
	report := func(phase string) error {
		_, err := s.RenewTask(t.Context(), w.Meta(""), w.ref(task), task.Attempt, phase, "")
		return err
	}
	complete := func() error {
		_, err := s.CompleteTask(t.Context(), w.Meta(""), w.ref(task), task.Attempt)
		return err
	}
	require.EqualValues(t, "task_phase_order", fault.As(report("start")).Code)
	require.NoError(t, report("install"))
	require.NoError(t, report("install"))
	require.EqualValues(t, "task_phase_order", fault.As(complete()).Code)
	require.NoError(t, report("start"))
	require.EqualValues(t, "task_phase_order", fault.As(report("install")).Code)
	require.NoError(t, complete())
}

func TestADecommissionDuringADeploymentWaitsForItsWorkerToStop(t *testing.T) {
	w := newWorld(t)
	i, allocations := w.cluster(2)
	deploy := w.next(i, "deploy")
	s := w.Commands()
	_, err := s.DecommissionInstance(t.Context(), w.Meta("end"), w.Project.ID, i.ID)
	require.NoError(t, err)
	end := w.tasks(i, lifecycle.TaskPending)
	require.Len(t, end, 1)
	_, err = w.claim(end[0], "b")
	require.EqualValues(t, "task_waits", fault.As(err).Code, "%v", err)

	renewed, err := s.RenewTask(t.Context(), w.Meta(""), w.ref(deploy), deploy.Attempt, "", "")
	require.NoError(t, err)
	require.True(t, renewed.CancelRequested)
	stopped, err := s.FailTask(t.Context(), w.Meta(""), w.ref(deploy), deploy.Attempt, "internal", "told to stop")
	require.NoError(t, err)
	require.Equal(t, lifecycle.TaskCancelled, stopped.State)
	require.Equal(t, lifecycle.Decommissioning, w.Get(i.ID).Lifecycle.Status)

	end[0], err = w.claim(end[0], "b")
	require.NoError(t, err)
	w.Report(1)
	require.False(t, w.Get(i.ID).Members[0].Gone, "a node's report says nothing of a member that a worker operates")
	_, err = s.FailTask(t.Context(), w.Meta(""), w.ref(end[0]), end[0].Attempt, "node_unreachable", "no route")
	require.NoError(t, err)
	require.Equal(t, protocol.WorkloadStatus_NODE_UNREACHABLE, w.Get(i.ID).Lifecycle.Reason)
	_, err = w.claim(end[0], "b")
	require.EqualValues(t, "task_waits", fault.As(err).Code, "it is tried again later")
	w.Now = w.Now.Add(time.Minute)
	w.finish(w.next(i, "decommission"))
	require.Equal(t, lifecycle.Decommissioned, w.Get(i.ID).Lifecycle.Status)
	for n, a := range allocations {
		released, err := s.ReleaseAllocation(t.Context(), w.Meta("release"+allocations[n].ID), w.Project.ID, a.ID)
		require.NoError(t, err)
		require.Equal(t, capacity.Released, released.Status)
	}
}

func TestADecommissionEndsWithTheLeaseOfADeadWorker(t *testing.T) {
	w := newWorld(t)
	i, _ := w.cluster(1)
	w.next(i, "deploy")
	_, err := w.Commands().DecommissionInstance(t.Context(), w.Meta("end"), w.Project.ID, i.ID)
	require.NoError(t, err)
	w.Now = w.Now.Add(time.Minute)
	w.finish(w.next(i, "decommission"))
	require.Len(t, w.tasks(i, lifecycle.TaskCancelled), 1)
}

// A worker that was silent for longer than its lease learns of the decommission by its next call: another worker may be
// removing by then what it still makes.
func TestAWorkerThatIsLateIsToldToStop(t *testing.T) {
	w := newWorld(t)
	i, _ := w.cluster(1)
	late := w.next(i, "deploy")
	w.Now = w.Now.Add(time.Minute)
	_, err := w.Commands().DecommissionInstance(t.Context(), w.Meta("end"), w.Project.ID, i.ID)
	require.NoError(t, err)
	w.next(i, "decommission")
	renewed, err := w.Commands().RenewTask(t.Context(), w.Meta(""), w.ref(late), late.Attempt, "", "")
	require.NoError(t, err)
	require.Equal(t, lifecycle.TaskCancelled, renewed.State)
	require.True(t, renewed.CancelRequested)
}

func TestAnInstanceThatNoWorkerBeganEndsAtOnce(t *testing.T) {
	w := newWorld(t)
	i, allocations := w.cluster(1)
	end, err := w.Commands().DecommissionInstance(t.Context(), w.Meta("end"), w.Project.ID, i.ID)
	require.NoError(t, err)
	require.Equal(t, lifecycle.Decommissioned, end.Lifecycle.Status)
	_, err = w.Commands().ReleaseAllocation(t.Context(), w.Meta("release"), w.Project.ID, allocations[0].ID)
	require.NoError(t, err)
}

func TestAFailedTaskSaysWhy(t *testing.T) {
	w := newWorld(t)
	i, _ := w.cluster(1)
	task := w.next(i, "deploy")
	s := w.Commands()
	_, err := s.FailTask(t.Context(), w.Meta(""), w.ref(task), task.Attempt, "lease_ended", "")
	require.EqualValues(t, "reason_unknown", fault.As(err).Code)
	for range 2 {
		_, err = s.FailTask(t.Context(), w.Meta(""), w.ref(task), task.Attempt, "environment_failed", "no packages")
		require.NoError(t, err)
	}
	require.Equal(t, lifecycle.Lifecycle{
		Status: lifecycle.Failed, Health: lifecycle.HealthUnhealthy, Reason: protocol.WorkloadStatus_ENVIRONMENT_FAILED,
	}, w.Get(i.ID).Lifecycle)
	_, err = s.StartInstance(t.Context(), w.Meta("again"), w.Project.ID, i.ID)
	require.NoError(t, err)
	w.finish(w.next(i, "deploy"))

	w.publishCluster("2.0.0")
	_, err = s.UpgradeInstance(t.Context(), w.Meta("up"), command.UpgradeInstanceInput{
		ProjectID: w.Project.ID, InstanceID: i.ID, Version: "2.0.0",
	})
	require.NoError(t, err)
	task = w.next(i, "upgrade")
	_, err = s.FailTask(t.Context(), w.Meta(""), w.ref(task), task.Attempt, "crash_loop", "")
	require.NoError(t, err)
	back := w.Get(i.ID)
	require.Equal(t, lifecycle.RollingBack, back.Lifecycle.Status)
	require.Equal(t, "1.0.0", back.Version)
	w.finish(w.next(i, "rollback"))
	require.Equal(t, lifecycle.Running, w.Get(i.ID).Lifecycle.Status)
}

func TestWhatRefusesAClusterChangesNothing(t *testing.T) {
	w := newWorld(t)
	i := w.runningCluster(1)
	free, taken := w.Allocation().ID, i.Members[0].AllocationID
	before := w.Contents()
	for code, ids := range map[string][]string{
		"placement_required":    nil,
		"insufficient_capacity": {taken},
		"placement_unsupported": {free, free},
		"allocation_unknown":    {db.NewID()},
	} {
		_, err := w.Commands().CreateInstance(t.Context(), w.Meta(code), command.CreateInstanceInput{
			ProjectID: w.Project.ID, AppSlug: "cluster", Version: "1.0.0", DisplayName: "c", AllocationIDs: ids,
		})
		require.EqualValues(t, code, fault.As(err).Code, "%v", err)
	}
	viewer := w.Meta("")
	viewer.Principal = iam.Principal{
		Type: principal.User, ID: db.NewID(), OrgID: w.Project.OrgID, Bindings: []iam.Binding{{Role: iam.Viewer}},
	}
	_, err := w.Commands().ClaimTask(t.Context(), viewer, w.ref(w.tasks(i, lifecycle.TaskSucceeded)[0]), "a", time.Minute)
	require.EqualValues(t, "forbidden", fault.As(err).Code)
	require.Equal(t, before, w.Contents())
}

func TestATaskIsInTheTraceOfTheRequestThatItFollowsFrom(t *testing.T) {
	const asked, workers = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
		"00-11111111111111111111111111111111-00000000000000bb-01"
	w := newWorld(t)
	i := w.runningCluster(1)
	w.publishCluster("2.0.0")
	s := w.Commands()
	_, err := s.UpgradeInstance(telemetry.Continue(t.Context(), asked), w.Meta("up"), command.UpgradeInstanceInput{
		ProjectID: w.Project.ID, InstanceID: i.ID, Version: "2.0.0",
	})
	require.NoError(t, err)
	upgrade := w.next(i, "upgrade")
	require.Equal(t, asked, upgrade.Traceparent)
	_, err = s.FailTask(telemetry.Continue(t.Context(), workers), w.Meta(""), w.ref(upgrade), upgrade.Attempt, "internal",
		"")
	require.NoError(t, err)
	require.Equal(t, asked, w.next(i, "rollback").Traceparent, "it follows from the upgrade, not from the worker")
	require.Empty(t, w.tasks(i, lifecycle.TaskSucceeded)[0].Traceparent, "the launch was in no trace")
}
