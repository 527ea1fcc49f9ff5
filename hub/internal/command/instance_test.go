package command_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/nodes"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestAnInstanceFromRequestToProof(t *testing.T) {
	w := newWorld(t)
	a := w.Allocation()
	require.Equal(t, w.Node, a.NodeID)
	before, _ := w.Wallet()

	i := w.Instance()
	require.Equal(t, lifecycle.Requested, i.Lifecycle.Status)
	require.Equal(t, []string{w.Node}, w.Enqueued)
	require.Equal(t, "project_isolated", i.Modes.TenantBoundaryMode)
	_, held := w.Wallet()
	require.Positive(t, held, "the lease is paid for in advance")
	w.compiles(i)

	w.Report(1, w.Says(i, protocol.WorkloadStatus_STARTING))
	w.Report(1, w.Says(i, protocol.WorkloadStatus_READY))
	require.Equal(t, lifecycle.Running, w.Get(i.ID).Lifecycle.Status)

	_, err := (&command.Service{DB: w.DB}).ReleaseAllocation(t.Context(), w.Meta("release-1"), w.Project.ID, a.ID)
	require.EqualValues(t, "allocation_in_use", fault.As(err).Code)

	i, err = w.Commands().DecommissionInstance(t.Context(), w.Meta("end"), w.Project.ID, i.ID)
	require.NoError(t, err)
	require.Equal(t, lifecycle.Decommissioning, i.Lifecycle.Status)
	require.Len(t, w.Enqueued, 2)
	releasing, err := (&command.Service{DB: w.DB}).ReleaseAllocation(t.Context(), w.Meta("release-2"), w.Project.ID, a.ID)
	require.NoError(t, err)
	require.Equal(t, capacity.Releasing, releasing.Status)

	w.Report(2, w.Removed(i))
	require.Equal(t, lifecycle.Decommissioned, w.Get(i.ID).Lifecycle.Status)
	require.Equal(t, []string{
		"apps.instance.requested", "apps.instance.deploying", "apps.instance.running", "apps.instance.decommission_requested",
		"apps.instance.decommissioned",
	}, w.EventTypes(i.ID))
	require.Equal(t, []string{
		"capacity.allocation.active", "capacity.allocation.releasing",
		"capacity.allocation.released",
	}, w.EventTypes(a.ID))
	after, held := w.Wallet()
	require.Equal(t, before, after+held, "nothing was used, nothing is gone")
}

// compiles checks that what was stored is what a node may be told.
func (w *world) compiles(i instance.Instance) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		members, err := instance.SnapshotFor(ctx, tx, w.Node)
		require.NoError(w.T, err)
		allocations, accelerators, err := capacity.SnapshotFor(ctx, tx, w.Node)
		require.NoError(w.T, err)
		snap := plan.Snapshot{
			Node: plan.Node{ID: w.Node, AcceleratorIDs: accelerators}, Allocations: allocations,
			Members: members,
		}
		state, err := plan.Compile(snap)
		require.NoError(w.T, err)
		require.NoError(w.T, plan.Check(snap, state))
		require.Len(w.T, state.Parts, 1)
		workload := &protocol.Workload{}
		require.NoError(w.T, proto.Unmarshal(state.Parts[0].Bytes, workload))
		require.Equal(w.T, i.ID, workload.GetInstanceId())
		require.JSONEq(w.T, `{"greeting":"hello"}`, workload.GetParametersJson())
		require.Equal(w.T, uint32(30), workload.GetReadinessTimeoutSeconds())
		require.Equal(w.T, commandtest.Image, workload.GetServices()[0].GetImage())
		require.Equal(w.T, uint32(500), workload.GetServices()[0].GetResources().GetCpuMillis())
		rev, err := fleet.LockIntent(ctx, tx, w.Node)
		require.Positive(w.T, rev)
		return err
	})
}

func TestAFailedDeploymentTellsTheNodeToStopTrying(t *testing.T) {
	w := newWorld(t)
	w.Allocation()
	i := w.Instance()
	failed := w.Says(i, protocol.WorkloadStatus_FAILED)
	failed.Reason = protocol.WorkloadStatus_READINESS_TIMEOUT
	require.Empty(t, w.Report(1, failed))
	w.Now = w.Now.Add(time.Minute)
	require.Equal(t, []string{w.Node}, w.Report(1, failed))
	require.Equal(t, []string{"apps.instance.requested", "apps.instance.deploying", "apps.instance.failed"},
		w.EventTypes(i.ID))
}

func TestAnInstanceThatNeverReachedItsNodeGivesEverythingBack(t *testing.T) {
	w := newWorld(t)
	w.Allocation()
	before, _ := w.Wallet()
	i := w.Instance()
	_, err := w.Commands().DecommissionInstance(t.Context(), w.Meta("end"), w.Project.ID, i.ID)
	require.NoError(t, err)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		return instance.RecordAbsentFrom(ctx, tx, w.Node, 1, 1, []string{}, w.Now)
	})
	w.Report(1)
	require.Equal(t, lifecycle.Decommissioned, w.Get(i.ID).Lifecycle.Status)
	after, held := w.Wallet()
	require.Equal(t, before, after)
	require.Zero(t, held)
}

func TestWhatRefusesAnInstanceChangesNothing(t *testing.T) {
	w := newWorld(t)
	stranger, outsider := w.NewTenant("other")
	cases := []struct {
		name   string
		code   fault.Code
		change func(*command.Meta, *command.CreateInstanceInput)
	}{
		{"another org's project", "not_found", func(m *command.Meta, _ *command.CreateInstanceInput) {
			m.Principal = outsider
		}},
		{"unknown app", "reference_unknown", func(_ *command.Meta, in *command.CreateInstanceInput) {
			in.AppSlug = "nothing"
		}},
		{"unknown version", "reference_unknown", func(_ *command.Meta, in *command.CreateInstanceInput) {
			in.Version = "9.9.9"
		}},
		{"no entitlement", catalog.CodeNotEntitled, func(m *command.Meta, in *command.CreateInstanceInput) {
			m.Principal, in.ProjectID = outsider, stranger.ID
		}},
		{"parameters out of schema", "parameters_invalid", func(_ *command.Meta, in *command.CreateInstanceInput) {
			in.Parameters = map[string]any{"x": 1}
		}},
		{"no allocation", "placement_required", func(*command.Meta, *command.CreateInstanceInput) {}},
		{"unknown allocation", "allocation_unknown", func(_ *command.Meta, in *command.CreateInstanceInput) {
			in.AllocationIDs = []string{db.NewID()}
		}},
	}
	before := w.Contents()
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			m, in := w.Meta("k"), w.InstanceInput()
			c.change(&m, &in)
			_, err := w.Commands().CreateInstance(t.Context(), m, in)
			require.Equal(t, c.code, fault.As(err).Code, "%v", err)
		})
	}
	require.Equal(t, before, w.Contents())
	require.Empty(t, w.Enqueued)
}

func TestAVersionBelowTheLowestOneStartsNoMoreWhileWhatRunsGoesOn(t *testing.T) {
	w := newWorld(t)
	i := w.Running()
	floor := func(app string) string { return map[string]string{"demo": "1.0.1"}[app] }
	strict := w.Commands()
	strict.WithMinVersion(floor)
	_, err := strict.CreateInstance(t.Context(), w.Meta("k"), w.InstanceInput())
	require.EqualValues(t, "app_version_too_old", fault.As(err).Code, "%v", err)
	require.Equal(t, "/version", fault.As(err).Fields[0].Pointer)
	require.Equal(t, lifecycle.Running, w.Get(i.ID).Lifecycle.Status)

	_, err = w.Commands().StopInstance(t.Context(), w.Meta("stop"), w.Project.ID, i.ID)
	require.NoError(t, err)
	w.Report(2, w.Says(w.Get(i.ID), protocol.WorkloadStatus_STOPPED))
	_, err = strict.StartInstance(t.Context(), w.Meta("start"), w.Project.ID, i.ID)
	require.EqualValues(t, "app_version_too_old", fault.As(err).Code, "%v", err)
	_, err = w.Commands().StartInstance(t.Context(), w.Meta("again"), w.Project.ID, i.ID)
	require.NoError(t, err, "without a lowest version it starts")
}

func TestNoMoneyNoInstance(t *testing.T) {
	w := newWorld(t)
	w.Allocation()
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, err := ledger.CreatePrice(ctx, tx, ledger.Price{
			ID: db.NewID(), Meter: protocol.MeterSessionSeconds, AppSlug: "demo", Currency: "EUR",
			Nanos: 900_000 * 1_000_000_000, Per: "hour", From: w.Now,
		}, w.Now)
		return err
	})
	before := w.Contents()
	_, err := w.Commands().CreateInstance(t.Context(), w.Meta("k"), w.InstanceInput())
	require.EqualValues(t, "insufficient_funds", fault.As(err).Code)
	require.Equal(t, before, w.Contents())
}

func TestTheSameKeyGivesTheSameInstance(t *testing.T) {
	w := newWorld(t)
	w.Allocation()
	first, err := w.Commands().CreateInstance(t.Context(), w.Meta("k"), w.InstanceInput())
	require.NoError(t, err)
	w.Report(1, w.Says(first, protocol.WorkloadStatus_READY))
	replays := 0
	m := w.Meta("k")
	m.OnReplay = func() { replays++ }
	again, err := w.Commands().CreateInstance(t.Context(), m, w.InstanceInput())
	require.NoError(t, err)
	require.Equal(t, 1, replays)
	require.Equal(t, first.ID, again.ID)
	require.Equal(t, lifecycle.Requested, again.Lifecycle.Status, "the answer of then, not of now")
}

func TestADrainingNodeGetsNoNewInstance(t *testing.T) {
	w := newWorld(t)
	a := w.Allocation()
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, _, err := fleet.Drain(ctx, tx, w.Node, w.Now)
		return err
	})
	in := w.InstanceInput()
	in.AllocationIDs = []string{a.ID}
	_, err := w.Commands().CreateInstance(t.Context(), w.Meta("k"), in)
	require.EqualValues(t, "insufficient_capacity", fault.As(err).Code)
	alloc := w.AllocationInput()
	alloc.NodeID = w.Node
	_, err = (&command.Service{DB: w.DB}).CreateAllocation(t.Context(), w.Meta("k2"), alloc)
	require.EqualValues(t, "insufficient_capacity", fault.As(err).Code)
}

func TestAnInstanceForANodeOutOfReachSaysSoAndWaits(t *testing.T) {
	w := newWorld(t)
	w.Allocation()
	w.Now = w.Now.Add(fleet.OnlineWindow)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		silent, err := fleet.SetUnreachable(ctx, tx, w.Node, w.Now)
		require.True(t, silent)
		return err
	})
	i := w.Instance()
	require.Equal(t, lifecycle.Lifecycle{
		Status: lifecycle.Requested, Health: lifecycle.HealthUnknown,
		Reason: protocol.WorkloadStatus_NODE_UNREACHABLE,
	}, i.Lifecycle)
	ended, err := w.Commands().DecommissionInstance(t.Context(), w.Meta("end"), w.Project.ID, i.ID)
	require.NoError(t, err)
	require.Equal(t, protocol.WorkloadStatus_NODE_UNREACHABLE, ended.Lifecycle.Reason)
	w.Report(1, w.Says(i, protocol.WorkloadStatus_STOPPING))
	require.Empty(t, w.Get(i.ID).Lifecycle.Reason, "contact")
}

// Law 13: a node that comes back gets what was asked for while it was out of reach: that is in its intent.
func TestLaw13WhatIsAskedOfANodeOutOfReachIsInItsIntent(t *testing.T) {
	w := newWorld(t)
	w.Allocation()
	w.Now = w.Now.Add(fleet.OnlineWindow)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, err := fleet.SetUnreachable(ctx, tx, w.Node, w.Now)
		return err
	})
	before := w.intentRev()
	i := w.Instance()
	require.True(t, i.Members[0].Unreachable)
	launched := w.intentRev()
	require.Greater(t, launched, before)
	require.NoError(t, second(w.Commands().DecommissionInstance(t.Context(), w.Meta("end"), w.Project.ID, i.ID)))
	require.Greater(t, w.intentRev(), launched)
}

// A creation reads nothing that a report writes, of its own node or of another: neither starts afresh for the other.
func TestACreationDoesNotConflictWithReports(t *testing.T) {
	w := newWorld(t)
	w.Allocation()
	i := w.Instance()
	// Of a table with a few rows PostgreSQL reads, and locks, all.
	w.Exec(`INSERT INTO instance_members (id, instance_id, allocation_id, node_id, role, status, status_reason, detail,
			observed_revision, unreachable, endpoints, restarts, exit_code, created_at, updated_at)
		SELECT gen_random_uuid(), gen_random_uuid(), $1, $1, 'node', 'pending', '', '', 0, false, '[]', 0, 0, $2, $2
		FROM generate_series(1, 1000)`, db.NewID(), w.Now)
	w.Exec(`ANALYZE instance_members`)
	attempts, reports := 0, 0
	around := func(tx db.Tx, body func(db.Tx) error) error {
		if _, err := tx.Exec(t.Context(), `SET LOCAL enable_seqscan = off`); err != nil {
			return err
		}
		if err := body(tx); err != nil {
			return err
		}
		if attempts++; attempts > 1 {
			return nil
		}
		w.Counter++
		w.Tx(func(ctx context.Context, tx db.Tx) error {
			reports++
			r := w.NodeReport(1, w.Says(i, protocol.WorkloadStatus_READY))
			applied, err := fleet.ApplyReport(ctx, tx, fleet.Report{
				NodeID: r.NodeID, SessionNo: r.SessionNo, Counter: r.Counter, Epoch: r.Epoch, Generation: r.Generation,
			}, w.Now)
			require.True(t, applied.Fresh)
			if err != nil {
				return err
			}
			return nodes.ApplyReport(ctx, tx, r, w.Now)
		})
		return nil
	}
	_, err := w.Commands().WithAround(around).CreateInstance(t.Context(), w.Meta("create"), w.InstanceInput())
	require.NoError(t, err)
	require.Equal(t, []int{1, 1}, []int{attempts, reports})
	require.Equal(t, lifecycle.Running, w.Get(i.ID).Lifecycle.Status)
}
