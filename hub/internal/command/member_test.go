package command_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/periodic"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

func (w *world) addMember(i instance.Instance, allocationID, key string) (instance.Instance, error) {
	return w.Commands().AddMember(w.T.Context(), w.Meta(key), w.Project.ID, i.ID, allocationID, "")
}

func TestAMemberComesAndGoesByTasksOfItsOwn(t *testing.T) {
	w := newWorld(t)
	i := w.runningCluster(1)
	a := w.Allocation()
	i, err := w.addMember(i, a.ID, "add")
	require.NoError(t, err)
	added := i.Members[1]
	require.Equal(t, "worker", added.Role)
	require.Equal(t, protocol.WorkloadStatus_PENDING, added.Status)
	_, err = w.addMember(i, a.ID, "again")
	require.EqualValues(t, "insufficient_capacity", fault.As(err).Code, "the allocation is the member's")
	task := w.next(i, "member_add")
	require.Equal(t, added.ID, task.MemberID)
	require.Equal(t, lifecycle.HealthHealthy, w.Get(i.ID).Lifecycle.Health, "a member that comes harms nothing")
	w.finish(task)
	require.Equal(t, protocol.WorkloadStatus_READY, w.Get(i.ID).Members[1].Status)

	s := w.Commands()
	_, err = s.RemoveMember(t.Context(), w.Meta("controller"), w.Project.ID, i.ID, i.Members[0].ID)
	require.EqualValues(t, "member_bounds", fault.As(err).Code, "%v", err)
	i, err = s.RemoveMember(t.Context(), w.Meta("remove"), w.Project.ID, i.ID, added.ID)
	require.NoError(t, err)
	require.Equal(t, protocol.WorkloadStatus_STOPPING, i.Members[1].Status)
	_, err = s.RecoverMember(t.Context(), w.Meta("recover"), w.Project.ID, i.ID, added.ID)
	require.EqualValues(t, "member_busy", fault.As(err).Code, "%v", err)
	w.finish(w.next(i, "member_remove"))
	i = w.Get(i.ID)
	require.True(t, i.Members[1].Gone)
	require.Equal(t, lifecycle.Lifecycle{Status: lifecycle.Running, Health: lifecycle.HealthHealthy}, i.Lifecycle)
	released, err := s.ReleaseAllocation(t.Context(), w.Meta("release"), w.Project.ID, a.ID)
	require.NoError(t, err)
	require.Equal(t, capacity.Released, released.Status)
}

// What a project may no longer start does not grow either: an admin has taken the app from it, or its version is known
// to be bad.
func TestAnAppThatTheProjectMayNotStartGetsNoMember(t *testing.T) {
	w := newWorld(t)
	i := w.runningCluster(1)
	a := w.Allocation()
	entitle := func(enabled bool, versions ...string) {
		w.Tx(func(ctx context.Context, tx db.Tx) error {
			_, _, err := catalog.PutEntitlement(ctx, tx, catalog.Entitlement{
				ProjectID: w.Project.ID, OrgID: w.Project.OrgID, AppSlug: i.AppSlug, Enabled: enabled, UpdatedBy: db.NewID(),
				Policy: catalog.Policy{AllowedVersions: versions},
			}, w.Now)
			return err
		})
	}
	entitle(false)
	_, err := w.addMember(i, a.ID, "withdrawn")
	require.Equal(t, catalog.CodeNotEntitled, fault.As(err).Code, "%v", err)
	entitle(true, "9.9.9")
	_, err = w.addMember(i, a.ID, "another version")
	require.Equal(t, catalog.CodePolicyRefused, fault.As(err).Code, "%v", err)
	entitle(true)
	_, err = w.addMember(i, a.ID, "entitled")
	require.NoError(t, err)
}

func TestSomeFailedMembersDegradeAnInstanceUntilTheyRecover(t *testing.T) {
	w := newWorld(t)
	i := w.runningCluster(2)
	s := w.Commands()
	report := func(m instance.Member, status protocol.WorkloadStatus_Status, reason string) (instance.Instance, error) {
		return s.ReportMember(t.Context(), w.Meta(""), w.Project.ID, i.ID,
			instance.MemberReport{MemberID: m.ID, Status: status}, reason)
	}
	_, err := report(i.Members[1], protocol.WorkloadStatus_FAILED, "")
	require.EqualValues(t, "reason_unknown", fault.As(err).Code)
	failed, err := report(i.Members[1], protocol.WorkloadStatus_FAILED, "device_fault")
	require.NoError(t, err)
	require.Equal(t, lifecycle.Lifecycle{
		Status: lifecycle.Running, Health: lifecycle.HealthDegraded, Reason: protocol.WorkloadStatus_DEVICE_FAULT,
	}, failed.Lifecycle)
	require.Equal(t, w.Now, w.Get(i.ID).Members[1].HeartbeatAt.UTC())
	events := len(w.EventTypes(i.ID))
	again, err := report(i.Members[1], protocol.WorkloadStatus_FAILED, "device_fault")
	require.NoError(t, err)
	require.Equal(t, failed.ResourceVersion, again.ResourceVersion)
	require.Len(t, w.EventTypes(i.ID), events, "a heartbeat is no event")
	all, err := report(i.Members[0], protocol.WorkloadStatus_FAILED, "node_unreachable")
	require.NoError(t, err)
	require.Equal(t, lifecycle.HealthUnhealthy, all.Lifecycle.Health)
	_, err = report(i.Members[0], protocol.WorkloadStatus_READY, "")
	require.NoError(t, err)

	_, err = s.RecoverMember(t.Context(), w.Meta("healthy"), w.Project.ID, i.ID, i.Members[0].ID)
	require.EqualValues(t, "member_busy", fault.As(err).Code)
	_, err = s.RecoverMember(t.Context(), w.Meta("recover"), w.Project.ID, i.ID, i.Members[1].ID)
	require.NoError(t, err)
	w.finish(w.next(i, "member_recover"))
	require.Equal(t, lifecycle.HealthHealthy, w.Get(i.ID).Lifecycle.Health)

	_, err = s.StopInstance(t.Context(), w.Meta("stop"), w.Project.ID, i.ID)
	require.NoError(t, err)
	_, err = w.addMember(i, w.Allocation().ID, "add")
	require.EqualValues(t, "instance_stopping", fault.As(err).Code, "%v", err)
}

// The lost member stays in the list; it does not end the others while they come and go.
func TestAClusterThatHasLostAMemberIsStoppedAndStarted(t *testing.T) {
	w := newWorld(t)
	i := w.runningCluster(2)
	w.Exec(`UPDATE instance_members SET status = 'failed', status_reason = 'node_lost', removed_at = $2 WHERE id = $1`,
		i.Members[1].ID, w.Now)
	work := func() lifecycle.Status {
		t.Helper()
		claimed, err := w.claim(w.tasks(i, lifecycle.TaskPending)[0], "a")
		require.NoError(t, err)
		w.finish(claimed)
		return w.Get(i.ID).Lifecycle.Status
	}
	_, err := w.Commands().StopInstance(t.Context(), w.Meta("stop"), w.Project.ID, i.ID)
	require.NoError(t, err)
	require.Equal(t, lifecycle.Stopped, work())
	_, err = w.Commands().StartInstance(t.Context(), w.Meta("start"), w.Project.ID, i.ID)
	require.NoError(t, err)
	require.Equal(t, lifecycle.Running, work())
}

func TestAMemberThatCannotJoinSaysWhy(t *testing.T) {
	w := newWorld(t)
	i := w.runningCluster(1)
	i, err := w.addMember(i, w.Allocation().ID, "add")
	require.NoError(t, err)
	task := w.next(i, "member_add")
	_, err = w.Commands().FailTask(t.Context(), w.Meta(""), w.ref(task), task.Attempt, "node_unreachable", "no route")
	require.NoError(t, err)
	i = w.Get(i.ID)
	require.Equal(t, protocol.WorkloadStatus_FAILED, i.Members[1].Status)
	require.Equal(t, "no route", i.Members[1].Detail)
	require.Equal(t, lifecycle.HealthDegraded, i.Lifecycle.Health)
	require.Equal(t, lifecycle.Running, i.Lifecycle.Status)
}

// TestMembersOfASilentWorkerCountAsFailedUntilItReportsThem: only those that a worker has reported before, only while
// their instance runs, and not before the hub itself has been there for that long.
func TestMembersOfASilentWorkerCountAsFailedUntilItReportsThem(t *testing.T) {
	w := newWorld(t)
	i := w.runningCluster(2)
	reported, silent := i.Members[0], i.Members[1]
	ready := instance.MemberReport{MemberID: reported.ID, Status: protocol.WorkloadStatus_READY}
	report := func() {
		t.Helper()
		_, err := w.Commands().ReportMember(t.Context(), w.Meta(""), w.Project.ID, i.ID, ready, "")
		require.NoError(t, err)
	}
	longAgo := w.Now.Add(-time.Hour)
	pass := func(started time.Time) instance.Instance {
		t.Helper()
		require.NoError(t, periodic.Passes{DB: w.DB, Log: slog.New(slog.DiscardHandler)}.
			MarkSilentMembers(t.Context(), started, w.Now))
		return w.Get(i.ID)
	}
	report()
	w.Now = w.Now.Add(instance.MemberSilence - time.Second)
	require.Equal(t, lifecycle.HealthHealthy, pass(longAgo).Lifecycle.Health)
	report()
	w.Now = w.Now.Add(instance.MemberSilence)
	require.Equal(t, lifecycle.HealthHealthy, pass(w.Now.Add(-time.Second)).Lifecycle.Health,
		"a hub that was away gives the worker time")
	events := len(w.EventTypes(i.ID))
	failed := pass(longAgo)
	require.Equal(t, lifecycle.Lifecycle{
		Status: lifecycle.Running, Health: lifecycle.HealthDegraded, Reason: protocol.WorkloadStatus_NODE_UNREACHABLE,
	}, failed.Lifecycle)
	require.Equal(t, protocol.WorkloadStatus_FAILED, failed.Members[0].Status)
	require.Equal(t, silent.Status, failed.Members[1].Status, "nobody has ever reported it")
	require.Contains(t, w.EventTypes(i.ID)[events:], "apps.instance.member_changed")
	before := w.Contents()
	pass(longAgo)
	require.Equal(t, before, w.Contents(), "once")

	report()
	require.Equal(t, lifecycle.HealthHealthy, w.Get(i.ID).Lifecycle.Health)
	require.Equal(t, protocol.WorkloadStatus_READY, w.Get(i.ID).Members[0].Status)

	// A task about all members takes long: its success is the worker's word about them.
	_, err := w.Commands().StopInstance(t.Context(), w.Meta("stop"), w.Project.ID, i.ID)
	require.NoError(t, err)
	w.Now = w.Now.Add(2 * instance.MemberSilence)
	require.Equal(t, protocol.WorkloadStatus_READY, pass(longAgo).Members[0].Status, "it does not run")
	w.finish(w.next(i, "stop"))
	_, err = w.Commands().StartInstance(t.Context(), w.Meta("start"), w.Project.ID, i.ID)
	require.NoError(t, err)
	w.Now = w.Now.Add(2 * instance.MemberSilence)
	w.finish(w.next(i, "deploy"))
	require.Equal(t, lifecycle.HealthHealthy, pass(longAgo).Lifecycle.Health)
	w.Now = w.Now.Add(instance.MemberSilence)
	require.Equal(t, lifecycle.HealthDegraded, pass(longAgo).Lifecycle.Health)

	_, err = w.Commands().ReportMember(t.Context(), w.Meta(""), w.Project.ID, i.ID,
		instance.MemberReport{MemberID: reported.ID, Status: protocol.WorkloadStatus_DEGRADED}, "device_fault")
	require.NoError(t, err)
	w.publishCluster("1.1.0")
	_, err = w.Commands().UpgradeInstance(t.Context(), w.Meta("upgrade"), command.UpgradeInstanceInput{
		ProjectID: w.Project.ID, InstanceID: i.ID, Version: "1.1.0",
	})
	require.NoError(t, err)
	w.Now = w.Now.Add(2 * instance.MemberSilence)
	w.finish(w.next(i, "upgrade"))
	require.Equal(t, protocol.WorkloadStatus_DEGRADED, pass(longAgo).Members[0].Status, "as it was reported before")
}
