package command

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

func (w *world) says(i instance.Instance, status protocol.WorkloadStatus_Status) *protocol.WorkloadStatus {
	return &protocol.WorkloadStatus{MemberId: i.Members[0].ID, InstanceId: i.ID, Revision: 1, Status: status}
}

func (w *world) removed(i instance.Instance) *protocol.WorkloadStatus {
	s := w.says(i, protocol.WorkloadStatus_REMOVED)
	s.Removal = &protocol.RemovalProof{At: timestamppb.New(w.now), Absent: protocol.RemovalKinds(), Incarnation: "i1"}
	return s
}

func (w *world) eventTypes(subject string) (types []string) {
	w.t.Helper()
	w.tx(func(ctx context.Context, tx db.Tx) error {
		list, err := event.BySubject(ctx, tx, event.SubjectQuery{Subject: subject})
		for n, e := range list {
			require.Equal(w.t, int64(n+1), e.ResourceVersion, "events are numbered without a gap")
			types = append(types, e.Type)
		}
		return err
	})
	return types
}

func TestAnInstanceFromRequestToProof(t *testing.T) {
	w := newWorld(t)
	a := w.allocation()
	require.Equal(t, w.node, a.NodeID)
	before, _ := w.wallet()

	i := w.instance()
	require.Equal(t, instance.Requested, i.Lifecycle.Status)
	require.Equal(t, []string{w.node}, w.poked)
	require.Equal(t, "project_isolated", i.Modes.TenantBoundaryMode)
	_, held := w.wallet()
	require.Positive(t, held, "the lease is paid for in advance")
	w.compiles(i)

	w.report(1, w.says(i, protocol.WorkloadStatus_STARTING))
	w.report(1, w.says(i, protocol.WorkloadStatus_READY))
	require.Equal(t, instance.Running, w.get(i.ID).Lifecycle.Status)

	_, err := (&Service{DB: w.d}).ReleaseAllocation(t.Context(), w.meta("release-1"), w.project.ID, a.ID)
	require.EqualValues(t, "allocation_in_use", fault.As(err).Code)

	i, err = w.commands().DecommissionInstance(t.Context(), w.meta("end"), w.project.ID, i.ID)
	require.NoError(t, err)
	require.Equal(t, instance.Decommissioning, i.Lifecycle.Status)
	require.Len(t, w.poked, 2)
	releasing, err := (&Service{DB: w.d}).ReleaseAllocation(t.Context(), w.meta("release-2"), w.project.ID, a.ID)
	require.NoError(t, err)
	require.Equal(t, capacity.Releasing, releasing.Status)

	w.report(2, w.removed(i))
	require.Equal(t, instance.Decommissioned, w.get(i.ID).Lifecycle.Status)
	require.Equal(t, []string{
		"apps.instance.requested", "apps.instance.deploying", "apps.instance.running", "apps.instance.decommission_requested",
		"apps.instance.decommissioned",
	}, w.eventTypes(i.ID))
	require.Equal(t, []string{
		"capacity.allocation.active", "capacity.allocation.releasing",
		"capacity.allocation.released",
	}, w.eventTypes(a.ID))
	after, held := w.wallet()
	require.Equal(t, before, after+held, "nothing was used, nothing is gone")
}

// compiles checks that what was stored is what a node may be told.
func (w *world) compiles(i instance.Instance) {
	w.t.Helper()
	w.tx(func(ctx context.Context, tx db.Tx) error {
		members, err := instance.SnapshotFor(ctx, tx, w.node)
		require.NoError(w.t, err)
		allocations, accelerators, err := capacity.SnapshotFor(ctx, tx, w.node)
		require.NoError(w.t, err)
		snap := plan.Snapshot{
			Node: plan.Node{ID: w.node, AcceleratorIDs: accelerators}, Allocations: allocations,
			Members: members,
		}
		state, err := plan.Compile(snap)
		require.NoError(w.t, err)
		require.NoError(w.t, plan.Check(snap, state))
		require.Len(w.t, state.Parts, 1)
		workload := &protocol.Workload{}
		require.NoError(w.t, proto.Unmarshal(state.Parts[0].Bytes, workload))
		require.Equal(w.t, i.ID, workload.GetInstanceId())
		require.JSONEq(w.t, `{"greeting":"hello"}`, workload.GetParametersJson())
		require.Equal(w.t, uint32(30), workload.GetReadinessTimeoutSeconds())
		require.Equal(w.t, demoImage, workload.GetServices()[0].GetImage())
		require.Equal(w.t, uint32(500), workload.GetServices()[0].GetResources().GetCpuMillis())
		rev, err := fleet.IntentRev(ctx, tx, w.node)
		require.Positive(w.t, rev)
		return err
	})
}

func TestAFailedDeploymentTellsTheNodeToStopTrying(t *testing.T) {
	w := newWorld(t)
	w.allocation()
	i := w.instance()
	failed := w.says(i, protocol.WorkloadStatus_FAILED)
	failed.Reason = protocol.WorkloadStatus_READINESS_TIMEOUT
	require.Empty(t, w.report(1, failed))
	w.now = w.now.Add(time.Minute)
	require.Equal(t, []string{w.node}, w.report(1, failed))
	require.Equal(t, []string{"apps.instance.requested", "apps.instance.deploying", "apps.instance.failed"},
		w.eventTypes(i.ID))
}

func TestAnInstanceThatNeverReachedItsNodeGivesEverythingBack(t *testing.T) {
	w := newWorld(t)
	w.allocation()
	before, _ := w.wallet()
	i := w.instance()
	_, err := w.commands().DecommissionInstance(t.Context(), w.meta("end"), w.project.ID, i.ID)
	require.NoError(t, err)
	w.tx(func(ctx context.Context, tx db.Tx) error {
		return instance.RecordAbsentFrom(ctx, tx, w.node, 1, 1, []string{}, w.now)
	})
	w.report(1)
	require.Equal(t, instance.Decommissioned, w.get(i.ID).Lifecycle.Status)
	after, held := w.wallet()
	require.Equal(t, before, after)
	require.Zero(t, held)
}

func TestWhatRefusesAnInstanceChangesNothing(t *testing.T) {
	w := newWorld(t)
	stranger, outsider := w.tenant("other")
	cases := []struct {
		name   string
		code   fault.Code
		change func(*Meta, *CreateInstanceInput)
	}{
		{"another org's project", "not_found", func(m *Meta, _ *CreateInstanceInput) { m.Principal = outsider }},
		{"unknown app", "reference_unknown", func(_ *Meta, in *CreateInstanceInput) { in.AppSlug = "nothing" }},
		{"unknown version", "reference_unknown", func(_ *Meta, in *CreateInstanceInput) { in.Version = "9.9.9" }},
		{"no entitlement", catalog.CodeNotEntitled, func(m *Meta, in *CreateInstanceInput) {
			m.Principal, in.ProjectID = outsider, stranger.ID
		}},
		{"parameters out of schema", "parameters_invalid", func(_ *Meta, in *CreateInstanceInput) {
			in.Parameters = map[string]any{"x": 1}
		}},
		{"no allocation", "placement_required", func(*Meta, *CreateInstanceInput) {}},
		{"unknown allocation", "allocation_unknown", func(_ *Meta, in *CreateInstanceInput) {
			in.AllocationIDs = []string{db.NewID()}
		}},
	}
	before := w.contents()
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			m, in := w.meta("k"), w.instanceInput()
			c.change(&m, &in)
			_, err := w.commands().CreateInstance(t.Context(), m, in)
			require.Equal(t, c.code, fault.As(err).Code, "%v", err)
		})
	}
	require.Equal(t, before, w.contents())
	require.Empty(t, w.poked)
}

func TestAVersionBelowTheLowestOneStartsNoMoreWhileWhatRunsGoesOn(t *testing.T) {
	w := newWorld(t)
	i := w.running()
	floor := func(app string) string { return map[string]string{"demo": "1.0.1"}[app] }
	strict := w.commands()
	strict.minVersionOf = floor
	_, err := strict.CreateInstance(t.Context(), w.meta("k"), w.instanceInput())
	require.EqualValues(t, "app_version_too_old", fault.As(err).Code, "%v", err)
	require.Equal(t, "/version", fault.As(err).Fields[0].Pointer)
	require.Equal(t, instance.Running, w.get(i.ID).Lifecycle.Status)

	_, err = w.commands().StopInstance(t.Context(), w.meta("stop"), w.project.ID, i.ID)
	require.NoError(t, err)
	w.report(2, w.says(w.get(i.ID), protocol.WorkloadStatus_STOPPED))
	_, err = strict.StartInstance(t.Context(), w.meta("start"), w.project.ID, i.ID)
	require.EqualValues(t, "app_version_too_old", fault.As(err).Code, "%v", err)
	_, err = w.commands().StartInstance(t.Context(), w.meta("again"), w.project.ID, i.ID)
	require.NoError(t, err, "without a lowest version it starts")
}

func TestNoMoneyNoInstance(t *testing.T) {
	w := newWorld(t)
	w.allocation()
	w.tx(func(ctx context.Context, tx db.Tx) error {
		_, err := ledger.CreatePrice(ctx, tx, ledger.Price{
			ID: db.NewID(), Meter: protocol.MeterSessionSeconds, AppSlug: "demo", Currency: "EUR",
			Nanos: 900_000 * 1_000_000_000, Per: "hour", From: w.now,
		}, w.now)
		return err
	})
	before := w.contents()
	_, err := w.commands().CreateInstance(t.Context(), w.meta("k"), w.instanceInput())
	require.EqualValues(t, "insufficient_funds", fault.As(err).Code)
	require.Equal(t, before, w.contents())
}

func TestTheSameKeyGivesTheSameInstance(t *testing.T) {
	w := newWorld(t)
	w.allocation()
	first, err := w.commands().CreateInstance(t.Context(), w.meta("k"), w.instanceInput())
	require.NoError(t, err)
	w.report(1, w.says(first, protocol.WorkloadStatus_READY))
	replays := 0
	m := w.meta("k")
	m.OnReplay = func() { replays++ }
	again, err := w.commands().CreateInstance(t.Context(), m, w.instanceInput())
	require.NoError(t, err)
	require.Equal(t, 1, replays)
	require.Equal(t, first.ID, again.ID)
	require.Equal(t, instance.Requested, again.Lifecycle.Status, "the answer of then, not of now")
}

func TestADrainingNodeGetsNoNewInstance(t *testing.T) {
	w := newWorld(t)
	a := w.allocation()
	w.tx(func(ctx context.Context, tx db.Tx) error {
		_, _, err := fleet.Drain(ctx, tx, w.node, w.now)
		return err
	})
	in := w.instanceInput()
	in.AllocationIDs = []string{a.ID}
	_, err := w.commands().CreateInstance(t.Context(), w.meta("k"), in)
	require.EqualValues(t, "insufficient_capacity", fault.As(err).Code)
	alloc := w.allocationInput()
	alloc.NodeID = w.node
	_, err = (&Service{DB: w.d}).CreateAllocation(t.Context(), w.meta("k2"), alloc)
	require.EqualValues(t, "insufficient_capacity", fault.As(err).Code)
}

func TestAnAllocationThatIsNotPaidEndsWithWhatRunsInIt(t *testing.T) {
	w := newWorld(t)
	a := w.allocation()
	i := w.instance()
	w.report(1, w.says(i, protocol.WorkloadStatus_READY))
	w.poked = nil
	unpaid := &Service{DB: w.d, EnqueueNode: func(nodeID string) { w.poked = append(w.poked, nodeID) }}
	require.NoError(t, unpaid.ReleaseUnpaid(t.Context(), a.ID, "corr-unpaid", w.now))
	require.Equal(t, []string{w.node}, w.poked)
	require.NoError(t, unpaid.ReleaseUnpaid(t.Context(), a.ID, "corr-unpaid", w.now), "again changes nothing")
	require.Len(t, w.poked, 1)
	require.Equal(t, instance.Decommissioning, w.get(i.ID).Lifecycle.Status)
	w.report(2, w.removed(i))
	require.Equal(t, instance.Decommissioned, w.get(i.ID).Lifecycle.Status)
	require.Equal(t, []string{
		"capacity.allocation.active", "capacity.allocation.releasing",
		"capacity.allocation.released",
	}, w.eventTypes(a.ID))
}

func TestAnInstanceForANodeOutOfReachSaysSoAndWaits(t *testing.T) {
	w := newWorld(t)
	w.allocation()
	w.now = w.now.Add(fleet.OnlineWindow)
	i := w.instance()
	require.Equal(t, instance.Lifecycle{
		Status: instance.Requested, Health: instance.HealthUnknown,
		Reason: protocol.WorkloadStatus_NODE_UNREACHABLE,
	}, i.Lifecycle)
	ended, err := w.commands().DecommissionInstance(t.Context(), w.meta("end"), w.project.ID, i.ID)
	require.NoError(t, err)
	require.Equal(t, protocol.WorkloadStatus_NODE_UNREACHABLE, ended.Lifecycle.Reason)
	w.report(1, w.says(i, protocol.WorkloadStatus_STOPPING))
	require.Empty(t, w.get(i.ID).Lifecycle.Reason, "contact")
}
