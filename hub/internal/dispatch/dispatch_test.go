package dispatch_test

import (
	"context"
	"crypto/ed25519"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/dispatch"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestConcurrentCommandsEndInOneStateWithAllOfThem(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	h.Launch()
	l.ExpectState(1)
	const more = 6
	var started sync.WaitGroup
	for range more {
		started.Go(func() { h.Launch() })
	}
	started.Wait()
	state, _ := l.ExpectState(1 + more)
	l.Report(state.GetGeneration())
	require.NoError(t, h.Dispatcher.SyncAll(t.Context()))
	require.Equal(t, 1,
		hubtest.Count(h, `SELECT count(*) FROM node_states s JOIN node_intents i ON i.node_id = s.node_id AND i.rev = s.rev
		WHERE s.node_id = $1 AND s.generation = $2`, n.ID, state.GetGeneration()), "the newest state is compiled from the "+
			"newest intent")
}

// Publishing is not serializable: it must wait for a change of the intent that is not committed yet, and then sign a
// state with that change, not one beside it.
func TestAStateIsNotSignedBesideAChangeOfTheIntent(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	h.Launch()
	state, _ := l.ExpectState(1)
	const least = 50
	waiting := func() bool {
		return hubtest.Count(h, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
			AND wait_event_type = 'Lock'`) > 0
	}
	require.NoError(t, db.WriteTx(t.Context(), h.DB, func(tx db.Tx) error {
		if err := fleet.BumpIntent(t.Context(), tx, n.ID); err != nil {
			return err
		}
		if _, err := fleet.LockIntent(t.Context(), tx, n.ID); err != nil {
			return err
		}
		h.Dispatcher.EnqueueAtLeast(n.ID, least)
		require.Eventually(t, waiting, time.Minute, time.Millisecond, "publishing waits for the change")
		return nil
	}))
	next, _ := l.ExpectState(1)
	require.Less(t, state.GetGeneration(), next.GetGeneration())
	require.EqualValues(t, least, next.GetGeneration(), "nothing was signed before the change")
	require.Zero(t, hubtest.Count(h, `SELECT count(*) FROM node_states s JOIN node_intents i ON i.node_id = s.node_id
		WHERE s.node_id = $1 AND s.generation >= $2 AND s.rev <> i.rev`, n.ID, least))
}

func TestOnlyTheNewestStatesAndTheirPartsAreKept(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	for range 4 {
		i := h.Launch()
		l.ExpectState(1)
		h.Decommission(i.ID)
		l.ExpectState(0)
	}
	require.LessOrEqual(t, hubtest.Count(h, `SELECT count(*) FROM node_states WHERE node_id = $1`, n.ID), 4)
	require.LessOrEqual(t, hubtest.Count(h, `SELECT count(*) FROM node_state_parts WHERE node_id = $1`, n.ID), 2)
}

// What a kept state names can be fetched, however long it has stood in the states and whatever else came and went.
func TestPartsOfEveryKeptStateCanBeFetched(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	stays := h.Launch()
	l.ExpectState(1)
	for range 3 {
		i := h.Launch()
		l.ExpectState(2)
		h.Decommission(i.ID)
		l.ExpectState(1)
	}
	named := func() (kept int) {
		t.Helper()
		envelopes, err := db.ReadTx(t.Context(), h.DB, func(tx db.Tx) ([][]byte, error) {
			rows, err := tx.Query(t.Context(), `SELECT envelope FROM node_states WHERE node_id = $1`, n.ID)
			require.NoError(t, err)
			return pgx.CollectRows(rows, pgx.RowTo[[]byte])
		})
		require.NoError(t, err)
		for _, raw := range envelopes {
			env, state := &protocol.Envelope{}, &protocol.DesiredState{}
			require.NoError(t, proto.Unmarshal(raw, env))
			require.NoError(t, proto.Unmarshal(env.GetPayload(), state))
			for _, p := range state.GetParts() {
				_, err := h.Dispatcher.Part(t.Context(), n.ID, p.GetSha256())
				require.NoError(t, err, "a part of generation %d", state.GetGeneration())
			}
		}
		return len(envelopes)
	}
	require.Equal(t, 4, named())
	h.Decommission(stays.ID)
	l.ExpectState(0)
	require.Equal(t, 4, named(), "the part that has just left is named by the states before")
}

func TestLeasesAreRenewedAtHalfLifeAndPushed(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	_, member, first := hubtest.Running(t, h, l)
	h.Advance(40 * time.Minute)
	require.NoError(t, h.Dispatcher.Renew(t.Context()))
	second := hubtest.Next(l, func(m *protocol.HubMessage) (*protocol.Lease, bool) {
		if m.GetPushLeases() == nil {
			return nil, false
		}
		v, err := protocol.VerifyLeases(m.GetPushLeases().GetEnvelope(), n.Bundle, n.Identity)
		require.NoError(t, err)
		return v.Message().GetLeases()[0], v.Message().GetLeases()[0].GetLeaseNo() > first.GetLeaseNo()
	})
	require.Equal(t, member, second.GetMemberId())
	require.True(t, second.GetExpiresAt().AsTime().After(first.GetExpiresAt().AsTime()))
	require.GreaterOrEqual(t, second.GetCapNanos(), first.GetCapNanos(), "caps are cumulative")
}

// A node that had leases gets the empty batch when it has none any more.
func TestANodeWithoutMembersGetsAnEmptyBatchOfLeases(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	i, member, _ := hubtest.Running(t, h, l)
	h.Decommission(i.ID)
	state, _ := l.ExpectState(0)
	l.Report(state.GetGeneration(), &protocol.WorkloadStatus{
		MemberId: member, Status: protocol.WorkloadStatus_REMOVED, Removal: &protocol.RemovalProof{
			At: timestamppb.New(h.Now()), Absent: protocol.RemovalKinds(), Incarnation: "i1",
		},
	})
	require.NoError(t, h.Dispatcher.SyncAll(t.Context()))
	batch := hubtest.Next(l, func(m *protocol.HubMessage) (*protocol.LeaseBatch, bool) {
		if m.GetPushLeases() == nil {
			return nil, false
		}
		v, err := protocol.VerifyLeases(m.GetPushLeases().GetEnvelope(), n.Bundle, n.Identity)
		require.NoError(t, err)
		return v.Message(), len(v.Message().GetLeases()) == 0
	})
	require.Equal(t, n.ID, batch.GetNodeId())
}

// A node refuses leases while its disk is full: they come again until it takes them.
func TestLaw13LeasesThatTheNodeCouldNotKeepComeAgain(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	_, _, lease := hubtest.Running(t, h, l)
	state := hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (uint64, error) {
		return dispatch.NewestGeneration(ctx, tx, n.ID)
	})
	for range 2 {
		l.Send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Nack{Nack: &protocol.Nack{
			Document: protocol.Envelope_LEASES,
			Reason:   protocol.Nack_UNAVAILABLE,
		}}})
		// Its acknowledgement comes after the refusal was taken in.
		l.Report(state)
		require.NoError(t, h.Dispatcher.SyncAll(t.Context()))
		again := hubtest.Next(l, func(m *protocol.HubMessage) (*protocol.LeaseBatch, bool) {
			if m.GetPushLeases() == nil {
				return nil, false
			}
			v, err := protocol.VerifyLeases(m.GetPushLeases().GetEnvelope(), n.Bundle, n.Identity)
			require.NoError(t, err)
			return v.Message(), true
		})
		require.Equal(t, lease.GetLeaseNo(), again.GetLeases()[0].GetLeaseNo())
	}
}

func TestAnEmptyWalletRenewsNothingAndStopsNothing(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	_, _, first := hubtest.Running(t, h, l)
	hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (int, error) {
		_, err := tx.Exec(ctx, `UPDATE wallets SET balance_nanos = 0`)
		return 0, err
	})
	h.Advance(50 * time.Minute)
	require.NoError(t, h.Dispatcher.Renew(t.Context()), "one empty wallet is no trouble of the pass")
	leases := hubtest.Tx(h, func(ctx context.Context, tx db.Tx) ([]*protocol.Lease, error) {
		return ledger.LeasesFor(ctx, tx, n.ID)
	})
	require.Equal(t, first.GetLeaseNo(), leases[0].GetLeaseNo())
	state, _ := n.Connect(hubtest.Hello("i2")).ExpectState(1)
	require.Len(t, state.GetParts(), 1, "the workload stays wanted; its lease ends it")
}

// A stopped instance costs no lease and, once its last one has ended, only what may still come; starting it gives it a
// new one.
func TestAStoppedInstanceHoldsNoMoreThanItMayStillSpend(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	i, member, lease := hubtest.Running(t, h, l)
	start := h.Now()
	h.Advance(time.Minute)
	require.Empty(t, hubtest.Upload(t, l.OpenUsage(),
		n.Seal("i1", []*protocol.UsageRecord{hubtest.SessionSeconds(member, lease, start, 60)})[0]).
		GetNackReason())
	_, err := (&command.Service{DB: h.DB}).StopInstance(t.Context(), h.Tenant("stop"),
		h.Project.ID,
		i.ID)
	require.NoError(t, err)
	state, _ := l.ExpectState(1)
	stopped := &protocol.WorkloadStatus{
		MemberId: member, InstanceId: i.ID, Revision: 1,
		Status: protocol.WorkloadStatus_STOPPED,
	}
	wallet := func() int { return hubtest.Count(h, `SELECT balance_nanos / 1000000 FROM wallets`) }
	before := wallet()
	for range 48 {
		l.Report(state.GetGeneration(), stopped)
		require.NoError(t, h.Dispatcher.Renew(t.Context()))
		h.Advance(30 * time.Minute)
	}
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM leases`))
	require.Greater(t, wallet(), before)
	require.Greater(t, wallet(), 999_000, "of 1000, a minute is spent and a quarter of an hour is held at most")

	_, err = (&command.Service{
		DB: h.DB, LeaseDuration: time.Hour, Bundle: h.Keys.Bundle,
	}).
		StartInstance(t.Context(), h.Tenant("start"), h.Project.ID, i.ID)
	require.NoError(t, err)
	require.Equal(t, 2, hubtest.Count(h, `SELECT count(*) FROM leases`))
	require.Less(t, wallet(), before+100)
	h.Advance(40 * time.Minute)
	require.NoError(t, h.Dispatcher.Renew(t.Context()))
	require.Equal(t, 3, hubtest.Count(h, `SELECT count(*) FROM leases`), "it is to run: its lease is renewed")
}

// One member that breaks a rule keeps neither its neighbours' documents nor anybody's leases from its node.
func TestAMemberThatBreaksARuleKeepsNoLeaseAndNoNeighbourFromItsNode(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	broken, _, first := hubtest.Running(t, h, l)
	hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (int, error) {
		_, err := tx.Exec(ctx, `UPDATE instance_revisions SET manifest_envelope = '\xffff' WHERE instance_id = $1`, broken.ID)
		return 0, err
	})
	made := h.Launch()
	state, push := l.ExpectState(2)
	require.Len(t, push.GetParts(), 2, "the broken one's last document stands")
	require.Equal(t, broken.Members[0].ID, h.Findings()[finding.Member])
	l.Report(state.GetGeneration(), hubtest.Ready(made))
	h.Advance(40 * time.Minute)
	require.NoError(t, h.Dispatcher.Renew(t.Context()))
	hubtest.Next(l, func(m *protocol.HubMessage) (bool, bool) {
		if m.GetPushLeases() == nil {
			return false, false
		}
		v, err := protocol.VerifyLeases(m.GetPushLeases().GetEnvelope(), n.Bundle, n.Identity)
		require.NoError(t, err)
		for _, lease := range v.Message().GetLeases() {
			if lease.GetMemberId() == first.GetMemberId() && lease.GetLeaseNo() > first.GetLeaseNo() {
				return true, true
			}
		}
		return false, false
	})
	h.Decommission(broken.ID)
	l.ExpectState(1)
	require.Empty(t, h.Findings())
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM events WHERE type = 'hub.recovery.finding_resolved'
		AND subject = $1 AND data ->> 'kind' = 'member_left_out'`, broken.Members[0].ID))
}

func TestAHubThatWasAwayGivesNodesTimeToComeBack(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	n.Connect(hubtest.Hello("i1")).ExpectState(0)
	h.Advance(time.Hour)
	h.Nodes.Started = h.Now()
	require.NoError(t, h.Nodes.Sweep(t.Context()))
	require.Equal(t, 0, hubtest.Count(h, `SELECT count(*) FROM events WHERE type = 'fleet.node.offline'`))
	h.Advance(fleet.OnlineWindow)
	require.NoError(t, h.Nodes.Sweep(t.Context()))
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM events WHERE type = 'fleet.node.offline'`))
}

// otherLease are a hub's keys with another one for leases.
type otherLease struct {
	*trust.Keys
	lease protocol.Signer
}

// Lease is part of dispatch.Keys.
func (k otherLease) Lease() protocol.Signer { return k.lease }

// The periodic pass skips a node that holds the latest leases, and only such a one.
func TestNodesThatHoldTheLatestLeasesAreUpToDate(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	hubtest.Running(t, h, l)
	acked, connected := h.Link.Acked(n.ID)
	require.True(t, connected)
	upToDate := func(acked nodelink.AckedState) bool {
		return hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (map[string]bool, error) {
			return h.Dispatcher.UpToDate(ctx, tx, []nodelink.AckedState{acked})
		})[n.ID]
	}
	require.True(t, upToDate(acked))
	for name, change := range map[string]func(*nodelink.AckedState){
		"has just connected": func(acked *nodelink.AckedState) { acked.LeasesSHA256 = nil },
		"another store":      func(acked *nodelink.AckedState) { acked.Incarnation = "i2" },
	} {
		other := acked
		change(&other)
		require.False(t, upToDate(other), name)
	}
	_, key, err := ed25519.GenerateKey(nil)
	require.NoError(t, err)
	rotated := &dispatch.Dispatcher{Config: dispatch.Config{Keys: otherLease{h.Keys, protocol.NewEd25519Signer(key)}}}
	require.Empty(t, hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (map[string]bool, error) {
		return rotated.UpToDate(ctx, tx, []nodelink.AckedState{acked})
	}), "its leases are signed with a key that may be revoked")
	h.Advance(40 * time.Minute)
	require.NoError(t, h.Dispatcher.Renew(t.Context()))
	require.False(t, upToDate(acked), "there is a newer lease")
}

// A lease that cannot be read keeps its own node from being up to date, and no other.
func TestALeaseThatCannotBeReadDelaysNoOtherNode(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	hubtest.Running(t, h, l)
	acked, _ := h.Link.Acked(n.ID)
	other := nodelink.AckedState{NodeID: db.NewID(), Incarnation: "i1"}
	current := hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (map[string]bool, error) {
		_, err := ledger.OpenMember(ctx, tx, ledger.Subject{
			ID: db.NewID(), OrgID: h.Project.OrgID, ProjectID: h.Project.ID, NodeID: other.NodeID, OpenedAt: h.Now(),
		}, time.Hour)
		require.NoError(t, err)
		_, err = tx.Exec(ctx, `UPDATE leases SET prices = '{}' WHERE node_id = $1`, other.NodeID)
		require.NoError(t, err)
		_, err = ledger.LeasesFor(ctx, tx, other.NodeID)
		require.Error(t, err)
		return h.Dispatcher.UpToDate(ctx, tx, []nodelink.AckedState{other, acked})
	})
	require.Equal(t, map[string]bool{n.ID: true}, current)
}

// What runs goes on while no state can be made: leases come first.
func TestLeasesReachANodeWhoseStateCannotBeMade(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	_, _, first := hubtest.Running(t, h, l)
	newest := func() uint64 {
		return hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (uint64, error) {
			return dispatch.NewestGeneration(ctx, tx, n.ID)
		})
	}
	before := newest()
	hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (int, error) {
		_, err := tx.Exec(ctx, fmt.Sprintf(`ALTER TABLE node_states ADD CONSTRAINT none_made CHECK (generation <= %d)`,
			before))
		return 0, err
	})
	h.Advance(40 * time.Minute)
	h.Launch()
	require.NoError(t, h.Dispatcher.Renew(t.Context()))
	hubtest.Next(l, func(m *protocol.HubMessage) (bool, bool) {
		if m.GetPushLeases() == nil {
			return false, false
		}
		v, err := protocol.VerifyLeases(m.GetPushLeases().GetEnvelope(), n.Bundle, n.Identity)
		require.NoError(t, err)
		return true, slices.ContainsFunc(v.Message().GetLeases(), func(lease *protocol.Lease) bool {
			return lease.GetMemberId() == first.GetMemberId() && lease.GetLeaseNo() > first.GetLeaseNo()
		})
	})
	require.Equal(t, before, newest())
}

// An instance that failed costs as little as one that was stopped, however long its node goes on to report the failure.
func TestAFailedInstanceHoldsNoMoreThanItMayStillSpend(t *testing.T) {
	h := hubtest.New(t)
	h.PublishDemo()
	l := h.Enroll().Connect(hubtest.Hello("i1"))
	l.ExpectState(0)
	i := h.Launch()
	state, _ := l.ExpectState(1)
	failed := &protocol.WorkloadStatus{
		MemberId: i.Members[0].ID, InstanceId: i.ID, Revision: 1, Status: protocol.WorkloadStatus_FAILED,
		Reason: protocol.WorkloadStatus_MANIFEST_NOT_ADMITTED,
	}
	l.Report(state.GetGeneration(), failed)
	h.Advance(time.Minute)
	l.Report(state.GetGeneration(), failed)
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM app_instances WHERE status = 'failed'`))
	h.BillADay(l, state.GetGeneration(), failed)
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM leases`))
	require.Greater(t, h.Wallet(), 999_000, "of 1000, a quarter of an hour is held at most")
}

// A running instance whose node waits for its owner is to run: its lease is renewed, and what its hold does not need
// goes back.
func TestAWaitingInstanceHoldsOneLease(t *testing.T) {
	h := hubtest.New(t)
	h.PublishDemo()
	l := h.Enroll().Connect(hubtest.Hello("i1"))
	l.ExpectState(0)
	i, member, _ := hubtest.Running(t, h, l)
	h.BillADay(l, 2, &protocol.WorkloadStatus{
		MemberId: member, InstanceId: i.ID, Revision: 1, Status: protocol.WorkloadStatus_FAILED,
		Reason: protocol.WorkloadStatus_OWNER_REFUSED,
	})
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM app_instances WHERE status = 'running'`))
	require.Greater(t, hubtest.Count(h, `SELECT count(*) FROM leases`), 20)
	require.Greater(t, h.Wallet(), 995_000, "of 1000, an hour and a quarter are held at most")
}
