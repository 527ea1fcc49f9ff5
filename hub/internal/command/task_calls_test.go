package command_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// upgradeCluster publishes version 2.0.0 and asks for it.
func (w *world) upgradeCluster(i instance.Instance) {
	w.T.Helper()
	w.publishCluster("2.0.0")
	_, err := w.Commands().UpgradeInstance(w.T.Context(), w.Meta("up"), command.UpgradeInstanceInput{
		ProjectID: w.Project.ID, InstanceID: i.ID, Version: "2.0.0",
	})
	require.NoError(w.T, err)
}

func TestTasksOfOneInstanceAreNotThoseOfAnother(t *testing.T) {
	w := newWorld(t)
	ending, _ := w.cluster(1)
	deploying, _ := w.launchCluster("deploying", 1)
	waiting, _ := w.launchCluster("waiting", 1)
	untouched, _ := w.launchCluster("untouched", 1)
	own, foreign := w.next(ending, "deploy"), w.next(deploying, "deploy")
	for _, i := range []instance.Instance{ending, deploying, waiting} {
		list := w.tasks(i, "")
		require.Len(t, list, 1)
		require.Equal(t, i.ID, list[0].InstanceID)
	}
	s := w.Commands()
	through := w.ref(foreign)
	through.InstanceID = ending.ID
	_, err := s.RenewTask(t.Context(), w.Meta(""), through, foreign.Attempt, "", "")
	require.Equal(t, fault.CodeNotFound, fault.As(err).Code, "%v", err)

	w.decommissioned(ending)
	renewed, err := s.RenewTask(t.Context(), w.Meta(""), w.ref(own), own.Attempt, "", "")
	require.NoError(t, err)
	require.True(t, renewed.CancelRequested)
	renewed, err = s.RenewTask(t.Context(), w.Meta(""), w.ref(foreign), foreign.Attempt, "", "")
	require.NoError(t, err)
	require.False(t, renewed.CancelRequested)
	require.Len(t, w.tasks(waiting, lifecycle.TaskPending), 1)
	end, err := s.DecommissionInstance(t.Context(), w.Meta("end untouched"), w.Project.ID, untouched.ID)
	require.NoError(t, err)
	require.Equal(t, lifecycle.Decommissioned, end.Lifecycle.Status, "workers began with others only")
}

func TestAPhaseIsAnEventAndAHeartbeatExtendsTheLease(t *testing.T) {
	w := newWorld(t)
	i, _ := w.cluster(1)
	task := w.next(i, "deploy")
	call := func(phase, detail string) (events []string) {
		t.Helper()
		before := w.EventTypes(i.ID)
		w.Now = w.Now.Add(task.Lease - time.Second)
		var err error
		task, err = w.Commands().RenewTask(t.Context(), w.Meta(""), w.ref(task), task.Attempt, phase, detail)
		require.NoError(t, err)
		return w.EventTypes(i.ID)[len(before):]
	}
	require.Equal(t, []string{"apps.instance.task_progressed"}, call("install", "one of two"))
	require.Empty(t, call("install", "two of two"))
	require.Empty(t, call("", ""))
	require.Equal(t, "two of two", task.Detail)
	require.Equal(t, w.Now.Add(time.Minute), task.LeaseExpiresAt)
	require.Empty(t, w.tasks(i, lifecycle.TaskPending), "its worker lives")
}

func TestATaskThatIsCompletedAfterItsCancellationMovesNothing(t *testing.T) {
	w := newWorld(t)
	i, _ := w.cluster(1)
	deploy := w.next(i, "deploy")
	w.decommissioned(i)
	for range 2 {
		ended, err := w.Commands().CompleteTask(t.Context(), w.Meta(""), w.ref(deploy), deploy.Attempt)
		require.NoError(t, err)
		require.Equal(t, lifecycle.TaskCancelled, ended.State)
	}
	i = w.Get(i.ID)
	require.Equal(t, lifecycle.Decommissioning, i.Lifecycle.Status)
	require.NotEqual(t, protocol.WorkloadStatus_READY, i.Members[0].Status)
	w.finish(w.next(i, "decommission"))
}

func TestAMemberStartsWithItsOwnTask(t *testing.T) {
	w := newWorld(t)
	i := w.runningCluster(1)
	for _, key := range []string{"first", "second"} {
		_, err := w.addMember(i, w.Allocation().ID, key)
		require.NoError(t, err)
	}
	task := w.next(i, "member_add")
	members := w.Get(i.ID).Members
	require.Equal(t, protocol.WorkloadStatus_STARTING, members[1].Status)
	require.Zero(t, members[1].ReadyAt)
	require.Equal(t, protocol.WorkloadStatus_PENDING, members[2].Status)
	w.finish(task)
	ready := w.Now
	members = w.Get(i.ID).Members
	require.Equal(t, protocol.WorkloadStatus_READY, members[1].Status)
	require.Equal(t, protocol.WorkloadStatus_PENDING, members[2].Status)
	w.Now = w.Now.Add(time.Minute)
	w.reportMember(i, members[1].ID, protocol.WorkloadStatus_READY, "")
	require.Equal(t, ready, w.Get(i.ID).Members[1].ReadyAt.UTC(), "it has been ready since then")
}

// reportMember reports a member as its worker does.
func (w *world) reportMember(i instance.Instance, id string, status protocol.WorkloadStatus_Status, reason string) {
	w.T.Helper()
	_, err := w.Commands().ReportMember(w.T.Context(), w.Meta(""), w.Project.ID, i.ID,
		instance.MemberReport{MemberID: id, Status: status, Detail: reason}, reason)
	require.NoError(w.T, err)
}

// TestAnUpgradeMakesNoFailedMemberReady: its worker could not report the members meanwhile.
func TestAnUpgradeMakesNoFailedMemberReady(t *testing.T) {
	w := newWorld(t)
	i := w.runningCluster(3)
	w.reportMember(i, i.Members[1].ID, protocol.WorkloadStatus_FAILED, "device_fault")
	w.reportMember(i, i.Members[2].ID, protocol.WorkloadStatus_DEGRADED, "disk_limit")
	w.upgradeCluster(i)
	w.finish(w.next(i, "upgrade"))
	i = w.Get(i.ID)
	require.Equal(t, lifecycle.Running, i.Lifecycle.Status)
	require.Equal(t, lifecycle.HealthDegraded, i.Lifecycle.Health)
	require.Equal(t, protocol.WorkloadStatus_READY, i.Members[0].Status)
	require.Equal(t, protocol.WorkloadStatus_FAILED, i.Members[1].Status)
	require.Equal(t, protocol.WorkloadStatus_DEVICE_FAULT, i.Members[1].Reason)
	require.Equal(t, protocol.WorkloadStatus_DEGRADED, i.Members[2].Status)

	_, err := w.Commands().RemoveMember(t.Context(), w.Meta("remove"), w.Project.ID, i.ID, i.Members[1].ID)
	require.NoError(t, err)
	w.finish(w.next(i, "member_remove"))
	removed := w.Get(i.ID).Members[1]
	require.Equal(t, protocol.WorkloadStatus_REMOVED, removed.Status)
	require.Zero(t, removed.Reason)
	require.Empty(t, removed.Detail)
	require.Equal(t, w.Now, removed.RemovedAt.UTC())
}

func TestTheFailureOfAnEndIsRepeatedByItsWorkerAlone(t *testing.T) {
	w := newWorld(t)
	i := w.runningCluster(1)
	w.decommissioned(i)
	end := w.next(i, "decommission")
	fail := func(m command.Meta) error {
		_, err := w.Commands().FailTask(t.Context(), m, w.ref(end), end.Attempt, "node_unreachable", "no route")
		return err
	}
	require.NoError(t, fail(w.Meta("")))
	before := w.Contents()
	require.NoError(t, fail(w.Meta("")), "the answer was lost")
	other := w.Meta("")
	other.Principal.ID, other.Principal.Type = db.NewID(), principal.User
	require.EqualValues(t, "task_fenced", fault.As(fail(other)).Code)
	require.Equal(t, before, w.Contents())
}

// TestWhatAWorkerOperatesHasNoSizesOfContainers: a member has its whole allocation.
func TestWhatAWorkerOperatesHasNoSizesOfContainers(t *testing.T) {
	w := newWorld(t)
	i := w.runningCluster(1)
	w.publishCluster("2.0.0")
	one := 1
	before := w.Contents()
	for name, choice := range map[string]manifest.Choice{
		"accelerators": {Accelerators: &one},
		"model":        {AcceleratorModel: "H200"},
		"sharing":      {AcceleratorSharing: "mig"},
		"cpu":          {CPUMillis: 1},
		"memory":       {MemoryMiB: 1},
		"disk":         {DiskMiB: 1},
		"shm":          {ShmMiB: 1},
		"ports":        {Ports: []manifest.PortChoice{{Name: "http"}}},
		"volumes":      {Volumes: []manifest.VolumeChoice{{Name: "data"}}},
		"environment":  {Environment: []string{"numpy"}},
	} {
		_, err := w.Commands().UpgradeInstance(t.Context(), w.Meta(name), command.UpgradeInstanceInput{
			ProjectID: w.Project.ID, InstanceID: i.ID, Version: "2.0.0", Resources: choice,
		})
		w.requireRefused(err, manifest.CodeResourcesInvalid, "/resources")
	}
	require.Equal(t, before, w.Contents())
}

// TestAWorkersAppIsOperatedWhileItsNodeAwaitsItsResync: the node knows no revisions of it.
func TestAWorkersAppIsOperatedWhileItsNodeAwaitsItsResync(t *testing.T) {
	w := newWorld(t)
	i := w.runningCluster(1)
	w.Exec(`UPDATE nodes SET resync = $1`, string(fleet.AwaitingResync))
	_, err := w.Commands().StopInstance(t.Context(), w.Meta("stop"), w.Project.ID, i.ID)
	require.NoError(t, err)
}
