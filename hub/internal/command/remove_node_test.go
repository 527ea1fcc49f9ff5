package command_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/fleet/fleettest"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

func (w *world) drained() {
	w.T.Helper()
	require.NoError(w.T, (&command.Service{DB: w.DB}).DrainNode(w.T.Context(), w.Admin("drain"+db.NewID()), w.Node))
}

// nodeEvents are those of commands on the node; it was enrolled here without one.
func (w *world) nodeEvents() (types []string) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		list, err := event.BySubject(ctx, tx, event.SubjectQuery{Subject: w.Node})
		for _, e := range list {
			types = append(types, e.Type)
		}
		return err
	})
	return types
}

// silent lets the node's contact run out.
func (w *world) silent() { w.Now = w.Now.Add(fleet.OnlineWindow) }

func (w *world) removeNode(in command.RemoveNodeInput) error {
	w.T.Helper()
	c := &command.Service{DB: w.DB}
	return c.RemoveNode(w.T.Context(), w.Admin("remove"+db.NewID()), w.Node, in)
}

func (w *world) fleetNode() (n fleet.Node) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) (err error) {
		n, err = fleet.Get(ctx, tx, w.Node)
		return err
	})
	return n
}

// uses posts a member's running time in one segment, the last of the member where final.
func (w *world) uses(member string, from, to time.Time, sequence uint64, final bool) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		segment, err := ledger.ReadSegment(billing.Store{NodeID: w.Node, Incarnation: "i1"}, &protocol.UsageSegment{
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
		_, err = ledger.PostUsage(ctx, tx, w.Now, segment)
		return err
	})
	require.NoError(w.T, w.passes().SettleMembersOf(w.T.Context(), []string{w.Node},
		w.Now))
}

func TestADrainedNodeTakesNothingNewUntilItIsUndrained(t *testing.T) {
	w := newWorld(t)
	i := w.Running()
	w.drained()
	require.Equal(t, fleet.Draining, w.fleetNode().Status(w.Now))
	_, err := (&command.Service{DB: w.DB}).CreateAllocation(t.Context(), w.Meta("full"), w.AllocationInput())
	require.EqualValues(t, "insufficient_capacity", fault.As(err).Code)
	w.Report(1, w.Says(i, protocol.WorkloadStatus_READY))
	require.Equal(t, lifecycle.Running, w.Get(i.ID).Lifecycle.Status, "what runs goes on")

	undrain := &command.Service{DB: w.DB}
	require.NoError(t, undrain.UndrainNode(t.Context(), w.Admin("undrain"), w.Node))
	require.NoError(t, undrain.UndrainNode(t.Context(), w.Admin("again"), w.Node), "a node that does not drain stays as "+
		"it is")
	w.Allocation()
	require.Equal(t, []string{"fleet.node.draining", "fleet.node.undrained"}, w.nodeEvents())
}

func TestANodeIsRemovedWhenItIsDrainedEmptyAndOwesNothing(t *testing.T) {
	w := newWorld(t)
	i := w.Running()
	a := i.Members[0].AllocationID
	refused := func(code fault.Code) {
		t.Helper()
		before := w.Contents()
		require.Equal(t, code, fault.As(w.removeNode(command.RemoveNodeInput{})).Code)
		require.Equal(t, before, w.Contents())
	}
	refused("node_not_draining")
	w.drained()
	refused("node_in_use")
	w.decommissioned(i)
	started := w.Now
	w.Report(2, w.Removed(i))
	refused("node_in_use")
	_, err := (&command.Service{DB: w.DB}).ReleaseAllocation(t.Context(), w.Meta("release"), w.Project.ID, a)
	require.NoError(t, err)
	refused("node_owes_usage")
	w.uses(i.Members[0].ID, started.Add(-time.Second), started, 1, true)
	rev := w.Count(`SELECT rev FROM node_intents WHERE node_id = $1`, w.Node)
	require.NoError(t, w.removeNode(command.RemoveNodeInput{Reason: "sold"}))

	require.Equal(t, rev+1, w.Count(`SELECT rev FROM node_intents WHERE node_id = $1`, w.Node), "a state that was "+
		"compiled before is not saved any more")
	n := w.fleetNode()
	require.Equal(t, fleet.Removed, n.Status(w.Now))
	require.Equal(t, "sold", n.RemoveReason)
	require.NoError(t, w.removeNode(command.RemoveNodeInput{Lost: true}), "the first outcome stays")
	require.Equal(t, n, w.fleetNode())
	for _, do := range []func() error{
		func() error { return (&command.Service{DB: w.DB}).DrainNode(t.Context(), w.Admin("d"), w.Node) },
		func() error { return (&command.Service{DB: w.DB}).UndrainNode(t.Context(), w.Admin("u"), w.Node) },
	} {
		require.EqualValues(t, "node_removed", fault.As(do()).Code)
	}
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, err := fleettest.Connect(ctx, tx, fleet.Connection{
			NodeID: w.Node, ReplicaID: "r1",
			Hello: &protocol.Hello{Incarnation: "i1"},
		}, w.Now)
		require.EqualValues(t, "node_removed", fault.As(err).Code)
		return nil
	})
}

// What a node kept for a project is gone with it: the project could not have it removed any more.
func TestEnvironmentsGoWithTheirNode(t *testing.T) {
	for _, in := range []command.RemoveNodeInput{{}, {Lost: true}} {
		w := newWorld(t)
		a := w.Allocation()
		w.Tx(func(ctx context.Context, tx db.Tx) error {
			return capacity.ApplyEnvironments(ctx, tx, map[string][]*protocol.InstalledEnvironment{
				w.Node: {{ProjectId: w.Project.ID, Digest: strings.Repeat("a", 64)}},
			})
		})
		listed := func() (out []capacity.Environment) {
			w.Tx(func(ctx context.Context, tx db.Tx) (err error) {
				out, err = capacity.Environments(ctx, tx, w.Project.ID, db.Page{Limit: 10})
				return err
			})
			return out
		}
		require.Len(t, listed(), 1)
		if in.Lost {
			w.silent()
		} else {
			w.drained()
			_, err := (&command.Service{DB: w.DB}).ReleaseAllocation(t.Context(), w.Meta("release"), w.Project.ID, a.ID)
			require.NoError(t, err)
		}
		require.NoError(t, w.removeNode(in))
		require.Empty(t, listed())
	}
}

func TestANodeInContactIsNotLost(t *testing.T) {
	w := newWorld(t)
	w.Running()
	before := w.Contents()
	require.EqualValues(t, "node_connected", fault.As(w.removeNode(command.RemoveNodeInput{Lost: true})).Code)
	require.Equal(t, before, w.Contents())
	require.NoError(t, (&command.Service{DB: w.DB}).BanNode(t.Context(), w.Admin("ban"),
		w.Node,
		"stolen"))
	require.NoError(t, w.removeNode(command.RemoveNodeInput{Lost: true}), "a banned node will never prove anything")
}

// Law 9: what became of the workloads of a lost node nobody proves; that is said, and not called a proof.
func TestLaw09ALostNodeIsAnOutcomeOfItsOwn(t *testing.T) {
	w := newWorld(t)
	runs := w.Running()
	a := runs.Members[0].AllocationID
	in := w.InstanceInput()
	in.AllocationIDs = []string{a}
	ending, err := w.Commands().CreateInstance(t.Context(), w.Meta("second"), in)
	require.NoError(t, err)
	w.Report(2, w.Says(runs, protocol.WorkloadStatus_READY), w.Says(ending, protocol.WorkloadStatus_READY))
	w.decommissioned(ending)
	before, held := w.Wallet()
	w.silent()
	require.NoError(t, w.removeNode(command.RemoveNodeInput{Lost: true, Reason: "burnt"}))
	lostAt := w.Now

	got := w.Get(runs.ID)
	require.Equal(t, lifecycle.Lifecycle{
		Status: lifecycle.Failed, Health: lifecycle.HealthUnhealthy,
		Reason: protocol.WorkloadStatus_NODE_LOST,
	}, got.Lifecycle)
	require.Equal(t, protocol.WorkloadStatus_FAILED, got.Members[0].Status)
	require.Equal(t, protocol.WorkloadStatus_NODE_LOST, got.Members[0].Reason)
	ended := w.Get(ending.ID)
	require.Equal(t, lifecycle.Lifecycle{
		Status: lifecycle.Decommissioned, Health: lifecycle.HealthUnknown,
		Reason: protocol.WorkloadStatus_NODE_LOST,
	}, ended.Lifecycle)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		got, err := capacity.GetAny(ctx, tx, a)
		require.Equal(t, capacity.NodeLost, got.Status)
		require.Equal(t, lostAt, got.ReleasedAt)
		require.Equal(t, got.CPUCores*1000, got.FreeCPUMillis)
		var open int
		require.NoError(t, tx.QueryRow(ctx, `SELECT count(*) FROM claims WHERE released_at IS NULL`).Scan(&open))
		require.Zero(t, open)
		members, err2 := instance.SnapshotFor(ctx, tx, w.Node)
		require.NoError(t, err2)
		require.Empty(t, members, "should it come back, it is to hold nothing")
		return err
	})
	require.Equal(t, []string{"fleet.node.lost"}, w.nodeEvents())
	require.Equal(t, "capacity.allocation.node_lost", w.EventTypes(a)[1])
	require.Equal(t, "apps.instance.failed", w.EventTypes(runs.ID)[3])

	_, err = w.Commands().UpgradeInstance(t.Context(), w.Meta("up"), command.UpgradeInstanceInput{
		ProjectID: w.Project.ID, InstanceID: runs.ID, Version: "1.0.0",
	})
	require.EqualValues(t, "node_lost", fault.As(err).Code)
	_, err = (&command.Service{DB: w.DB}).ReleaseAllocation(t.Context(), w.Meta("release"), w.Project.ID, a)
	require.EqualValues(t, "allocation_node_lost", fault.As(err).Code)
	gone, err := w.Commands().DecommissionInstance(t.Context(), w.Meta("end it"), w.Project.ID, runs.ID)
	require.NoError(t, err)
	require.Equal(t, lifecycle.Lifecycle{
		Status: lifecycle.Decommissioned, Health: lifecycle.HealthUnknown,
		Reason: protocol.WorkloadStatus_NODE_LOST,
	}, gone.Lifecycle)

	available, stillHeld := w.Wallet()
	require.Equal(t, before, available, "holds wait for what the node may still bring")
	require.Equal(t, held, stillHeld)
}

// Law 5: what a lost node uploads after its return is billed up to its loss, once; the hold goes back with its last
// record, or when nothing has come for 30 days.
func TestLaw05ALostNodesLateUsageIsBilledUpToItsLossAndOnce(t *testing.T) {
	w := newWorld(t)
	i := w.Running()
	from := w.Now
	before, held := w.Wallet()
	w.silent()
	require.NoError(t, w.removeNode(command.RemoveNodeInput{Lost: true}))
	lostAt := w.Now
	w.Now = w.Now.Add(time.Hour)
	w.uses(i.Members[0].ID, from, lostAt.Add(10*time.Minute), 1, false)
	w.uses(i.Members[0].ID, from, lostAt.Add(10*time.Minute), 2, true)
	available, stillHeld := w.Wallet()
	require.Zero(t, stillHeld, "the last record settles")
	// 3.60 an hour is a thousandth a second.
	require.Equal(t, before+held-lostAt.Sub(from).Nanoseconds()/1000, available)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
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
	w.Running()
	before, held := w.Wallet()
	w.silent()
	require.NoError(t, w.removeNode(command.RemoveNodeInput{Lost: true}))
	stale := func(at time.Time) int {
		n, err := w.passes().SettleMembers(t.Context(), at)
		require.NoError(t, err)
		return n
	}
	require.Zero(t, stale(w.Now.Add(billing.StaleAfter)), "its lease ended later than that")
	require.Equal(t, 1, stale(w.Now.Add(billing.StaleAfter+2*time.Hour)))
	available, stillHeld := w.Wallet()
	require.Zero(t, stillHeld)
	require.Equal(t, before+held, available)
}
