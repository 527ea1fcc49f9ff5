package command

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/fleet/fleettest"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

func (w *world) admin(key string) Meta {
	m := w.meta(key)
	m.Principal = iam.Principal{Type: principal.User, ID: db.NewID(), PlatformAdmin: true}
	return m
}

func (w *world) drained() {
	w.t.Helper()
	require.NoError(w.t, (&Service{DB: w.d}).DrainNode(w.t.Context(), w.admin("drain"+db.NewID()), w.node))
}

// nodeEvents are those of commands on the node; it was enrolled here without one.
func (w *world) nodeEvents() (types []string) {
	w.t.Helper()
	w.tx(func(ctx context.Context, tx db.Tx) error {
		list, err := event.BySubject(ctx, tx, event.SubjectQuery{Subject: w.node})
		for _, e := range list {
			types = append(types, e.Type)
		}
		return err
	})
	return types
}

// silent lets the node's contact run out.
func (w *world) silent() { w.now = w.now.Add(fleet.OnlineWindow) }

func (w *world) removeNode(in RemoveNodeInput) error {
	w.t.Helper()
	c := &Service{DB: w.d, ShutOut: func(string, string) {}, EnqueueNode: w.poke}
	return c.RemoveNode(w.t.Context(), w.admin("remove"+db.NewID()), w.node, in)
}

func (w *world) fleetNode() (n fleet.Node) {
	w.t.Helper()
	w.tx(func(ctx context.Context, tx db.Tx) (err error) {
		n, err = fleet.Get(ctx, tx, w.node)
		return err
	})
	return n
}

// uses posts a member's running time in one segment, the last of the member where final.
func (w *world) uses(member string, from, to time.Time, sequence uint64, final bool) {
	w.t.Helper()
	w.tx(func(ctx context.Context, tx db.Tx) error {
		segment, err := ledger.ReadSegment(billing.Store{NodeID: w.node, Incarnation: "i1"}, &protocol.UsageSegment{
			Number: sequence,
			Records: []*protocol.UsageRecord{{
				Sequence: sequence, MemberId: member, RunId: "r1", Meter: protocol.MeterSessionSeconds,
				Quantity: to.Sub(from).Microseconds(),
				LeaseNo:  1, Revision: 1, StartedAt: timestamppb.New(from), EndedAt: timestamppb.New(to), Final: final,
			}},
		}, []byte{})
		if err != nil {
			return err
		}
		_, err = ledger.PostUsage(ctx, tx, w.now, segment)
		return err
	})
	require.NoError(w.t, (&SettleMembers{DB: w.d, Log: slog.New(slog.DiscardHandler)}).Of(w.t.Context(), []string{w.node},
		w.now))
}

func TestADrainedNodeTakesNothingNewUntilItIsUndrained(t *testing.T) {
	w := newWorld(t)
	i := w.running()
	w.drained()
	require.Equal(t, fleet.Draining, w.fleetNode().Status(w.now))
	_, err := (&Service{DB: w.d}).CreateAllocation(t.Context(), w.meta("full"), w.allocationInput())
	require.EqualValues(t, "insufficient_capacity", fault.As(err).Code)
	w.report(1, w.says(i, protocol.WorkloadStatus_READY))
	require.Equal(t, instance.Running, w.get(i.ID).Lifecycle.Status, "what runs goes on")

	undrain := &Service{DB: w.d}
	require.NoError(t, undrain.UndrainNode(t.Context(), w.admin("undrain"), w.node))
	require.NoError(t, undrain.UndrainNode(t.Context(), w.admin("again"), w.node), "a node that does not drain stays as "+
		"it is")
	w.allocation()
	require.Equal(t, []string{"fleet.node.draining", "fleet.node.undrained"}, w.nodeEvents())
}

func TestANodeIsRemovedWhenItIsDrainedEmptyAndOwesNothing(t *testing.T) {
	w := newWorld(t)
	i := w.running()
	a := i.Members[0].AllocationID
	refused := func(code fault.Code) {
		t.Helper()
		before := w.contents()
		require.Equal(t, code, fault.As(w.removeNode(RemoveNodeInput{})).Code)
		require.Equal(t, before, w.contents())
	}
	refused("node_not_draining")
	w.drained()
	refused("node_in_use")
	w.decommissioned(i)
	started := w.now
	w.report(2, w.removed(i))
	refused("node_in_use")
	_, err := (&Service{DB: w.d}).ReleaseAllocation(t.Context(), w.meta("release"), w.project.ID, a)
	require.NoError(t, err)
	refused("node_owes_usage")
	w.uses(i.Members[0].ID, started.Add(-time.Second), started, 1, true)
	require.NoError(t, w.removeNode(RemoveNodeInput{Reason: "sold"}))

	n := w.fleetNode()
	require.Equal(t, fleet.Removed, n.Status(w.now))
	require.Equal(t, "sold", n.RemoveReason)
	require.NoError(t, w.removeNode(RemoveNodeInput{Lost: true}), "the first outcome stays")
	require.Equal(t, n, w.fleetNode())
	for _, do := range []func() error{
		func() error { return (&Service{DB: w.d}).DrainNode(t.Context(), w.admin("d"), w.node) },
		func() error { return (&Service{DB: w.d}).UndrainNode(t.Context(), w.admin("u"), w.node) },
	} {
		require.EqualValues(t, "node_removed", fault.As(do()).Code)
	}
	w.tx(func(ctx context.Context, tx db.Tx) error {
		_, err := fleettest.Connect(ctx, tx, fleet.Connection{
			NodeID: w.node, ReplicaID: "r1",
			Hello: &protocol.Hello{Incarnation: "i1"},
		}, w.now)
		require.EqualValues(t, "node_removed", fault.As(err).Code)
		return nil
	})
}

func TestANodeInContactIsNotLost(t *testing.T) {
	w := newWorld(t)
	w.running()
	before := w.contents()
	require.EqualValues(t, "node_connected", fault.As(w.removeNode(RemoveNodeInput{Lost: true})).Code)
	require.Equal(t, before, w.contents())
	require.NoError(t, (&Service{DB: w.d, ShutOut: func(string, string) {}}).BanNode(t.Context(), w.admin("ban"), w.node,
		"stolen"))
	require.NoError(t, w.removeNode(RemoveNodeInput{Lost: true}), "a banned node will never prove anything")
}

// Law 9: what became of the workloads of a lost node nobody proves; that is said, and not called a proof.
func TestLaw09ALostNodeIsAnOutcomeOfItsOwn(t *testing.T) {
	w := newWorld(t)
	runs := w.running()
	a := runs.Members[0].AllocationID
	in := w.instanceInput()
	in.AllocationIDs = []string{a}
	ending, err := w.commands().CreateInstance(t.Context(), w.meta("second"), in)
	require.NoError(t, err)
	w.report(2, w.says(runs, protocol.WorkloadStatus_READY), w.says(ending, protocol.WorkloadStatus_READY))
	w.decommissioned(ending)
	before, held := w.wallet()
	w.silent()
	require.NoError(t, w.removeNode(RemoveNodeInput{Lost: true, Reason: "burnt"}))
	lostAt := w.now

	got := w.get(runs.ID)
	require.Equal(t, instance.Lifecycle{
		Status: instance.Failed, Health: instance.HealthUnhealthy,
		Reason: protocol.WorkloadStatus_NODE_LOST,
	}, got.Lifecycle)
	require.Equal(t, protocol.WorkloadStatus_FAILED, got.Members[0].Status)
	require.Equal(t, protocol.WorkloadStatus_NODE_LOST, got.Members[0].Reason)
	ended := w.get(ending.ID)
	require.Equal(t, instance.Lifecycle{
		Status: instance.Decommissioned, Health: instance.HealthUnknown,
		Reason: protocol.WorkloadStatus_NODE_LOST,
	}, ended.Lifecycle)
	w.tx(func(ctx context.Context, tx db.Tx) error {
		got, err := capacity.GetAny(ctx, tx, a)
		require.Equal(t, capacity.NodeLost, got.Status)
		require.Equal(t, lostAt, got.ReleasedAt)
		require.Equal(t, got.CPUCores*1000, got.FreeCPUMillis)
		var open int
		require.NoError(t, tx.QueryRow(ctx, `SELECT count(*) FROM claims WHERE released_at IS NULL`).Scan(&open))
		require.Zero(t, open)
		members, err2 := instance.SnapshotFor(ctx, tx, w.node)
		require.NoError(t, err2)
		require.Empty(t, members, "should it come back, it is to hold nothing")
		return err
	})
	require.Equal(t, []string{"fleet.node.lost"}, w.nodeEvents())
	require.Equal(t, "capacity.allocation.node_lost", w.eventTypes(a)[1])
	require.Equal(t, "apps.instance.failed", w.eventTypes(runs.ID)[3])

	_, err = w.commands().UpgradeInstance(t.Context(), w.meta("up"), w.project.ID, runs.ID, "1.0.0")
	require.EqualValues(t, "node_lost", fault.As(err).Code)
	_, err = (&Service{DB: w.d}).ReleaseAllocation(t.Context(), w.meta("release"), w.project.ID, a)
	require.EqualValues(t, "allocation_node_lost", fault.As(err).Code)
	gone, err := w.commands().DecommissionInstance(t.Context(), w.meta("end it"), w.project.ID, runs.ID)
	require.NoError(t, err)
	require.Equal(t, instance.Lifecycle{
		Status: instance.Decommissioned, Health: instance.HealthUnknown,
		Reason: protocol.WorkloadStatus_NODE_LOST,
	}, gone.Lifecycle)

	available, stillHeld := w.wallet()
	require.Equal(t, before, available, "holds wait for what the node may still bring")
	require.Equal(t, held, stillHeld)
}

// Law 5: what a lost node brings all the same is billed up to its loss, once; the hold goes back with its last record,
// or when nothing has come for 30 days.
func TestLaw05ALostNodesLateUsageIsBilledUpToItsLossAndOnce(t *testing.T) {
	w := newWorld(t)
	i := w.running()
	from := w.now
	before, held := w.wallet()
	w.silent()
	require.NoError(t, w.removeNode(RemoveNodeInput{Lost: true}))
	lostAt := w.now
	w.now = w.now.Add(time.Hour)
	w.uses(i.Members[0].ID, from, lostAt.Add(10*time.Minute), 1, false)
	w.uses(i.Members[0].ID, from, lostAt.Add(10*time.Minute), 2, true)
	available, stillHeld := w.wallet()
	require.Zero(t, stillHeld, "the last record settles")
	// 3.60 an hour is a thousandth a second.
	require.Equal(t, before+held-lostAt.Sub(from).Nanoseconds()/1000, available)
	w.tx(func(ctx context.Context, tx db.Tx) error {
		reasons := map[string]bool{}
		rows, err := tx.Query(ctx, `SELECT reason FROM suspense_records`)
		require.NoError(t, err)
		for rows.Next() {
			var reason string
			require.NoError(t, rows.Scan(&reason))
			reasons[reason] = true
		}
		require.Equal(t, map[string]bool{billing.SuspenseOutsideClaim: true, billing.SuspenseAlreadyBilled: true}, reasons)
		return rows.Err()
	})
}

func TestTheHoldOfALostMemberGoesBackAfterThirtyDaysOfSilence(t *testing.T) {
	w := newWorld(t)
	w.running()
	before, held := w.wallet()
	w.silent()
	require.NoError(t, w.removeNode(RemoveNodeInput{Lost: true}))
	stale := func(at time.Time) int {
		n, err := (&SettleMembers{DB: w.d, Log: slog.New(slog.DiscardHandler)}).Do(t.Context(), at)
		require.NoError(t, err)
		return n
	}
	require.Zero(t, stale(w.now.Add(billing.StaleAfter)), "its lease ended later than that")
	require.Equal(t, 1, stale(w.now.Add(billing.StaleAfter+2*time.Hour)))
	available, stillHeld := w.wallet()
	require.Zero(t, stillHeld)
	require.Equal(t, before+held, available)
}
