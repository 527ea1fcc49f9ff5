package nodelink_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/dispatch"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestConcurrentCommandsEndInOneStateWithAllOfThem(t *testing.T) {
	h := newHub(t)
	h.publish()
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	h.launch()
	l.state(1)
	const more = 6
	var started sync.WaitGroup
	for range more {
		started.Go(func() { h.launch() })
	}
	started.Wait()
	state, _ := l.state(1 + more)
	l.report(state.GetGeneration())
	require.NoError(t, h.dispatcher.SyncAll(t.Context()))
	require.Equal(t, 1,
		count(h, `SELECT count(*) FROM node_states s JOIN node_intents i ON i.node_id = s.node_id AND i.rev = s.rev
		WHERE s.node_id = $1 AND s.generation = $2`, n.id, state.GetGeneration()), "the newest state is compiled from the "+
			"newest intent")
}

func TestOnlyTheNewestStatesAndTheirPartsAreKept(t *testing.T) {
	h := newHub(t)
	h.publish()
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	for range 4 {
		i := h.launch()
		l.state(1)
		h.decommission(i.ID)
		l.state(0)
	}
	require.LessOrEqual(t, count(h, `SELECT count(*) FROM node_states WHERE node_id = $1`, n.id), 4)
	require.LessOrEqual(t, count(h, `SELECT count(*) FROM node_state_parts WHERE node_id = $1`, n.id), 2)
}

// What a kept state names can be fetched, however long it has stood in the states and whatever else came and went.
func TestPartsOfEveryKeptStateCanBeFetched(t *testing.T) {
	h := newHub(t)
	h.publish()
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	stays := h.launch()
	l.state(1)
	for range 3 {
		i := h.launch()
		l.state(2)
		h.decommission(i.ID)
		l.state(1)
	}
	named := func() (kept int) {
		t.Helper()
		envelopes, err := db.ReadTx(t.Context(), h.d, func(tx db.Tx) ([][]byte, error) {
			rows, err := tx.Query(t.Context(), `SELECT envelope FROM node_states WHERE node_id = $1`, n.id)
			require.NoError(t, err)
			return pgx.CollectRows(rows, pgx.RowTo[[]byte])
		})
		require.NoError(t, err)
		for _, raw := range envelopes {
			env, state := &protocol.Envelope{}, &protocol.DesiredState{}
			require.NoError(t, proto.Unmarshal(raw, env))
			require.NoError(t, proto.Unmarshal(env.GetPayload(), state))
			for _, p := range state.GetParts() {
				_, err := h.dispatcher.Part(t.Context(), n.id, p.GetSha256())
				require.NoError(t, err, "a part of generation %d", state.GetGeneration())
			}
		}
		return len(envelopes)
	}
	require.Equal(t, 4, named())
	h.decommission(stays.ID)
	l.state(0)
	require.Equal(t, 4, named(), "the part that has just left is named by the states before")
}

func TestLeasesAreRenewedAtHalfLifeAndPushed(t *testing.T) {
	h := newHub(t)
	h.publish()
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	_, member, first := running(t, h, l)
	h.forward(40 * time.Minute)
	require.NoError(t, h.dispatcher.Renew(t.Context()))
	second := next(l, func(m *protocol.HubMessage) (*protocol.Lease, bool) {
		if m.GetPushLeases() == nil {
			return nil, false
		}
		v, err := protocol.VerifyLeases(m.GetPushLeases().GetEnvelope(), n.bundle, n.me)
		require.NoError(t, err)
		return v.Message().GetLeases()[0], v.Message().GetLeases()[0].GetLeaseNo() > first.GetLeaseNo()
	})
	require.Equal(t, member, second.GetMemberId())
	require.True(t, second.GetExpiresAt().AsTime().After(first.GetExpiresAt().AsTime()))
	require.GreaterOrEqual(t, second.GetCapNanos(), first.GetCapNanos(), "caps are cumulative")
}

// A node refuses leases while its disk is full: they come again until it takes them.
func TestLaw13LeasesThatTheNodeCouldNotKeepComeAgain(t *testing.T) {
	h := newHub(t)
	h.publish()
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	_, _, lease := running(t, h, l)
	state := tx(h, func(ctx context.Context, tx db.Tx) (uint64, error) { return dispatch.NewestGeneration(ctx, tx, n.id) })
	for range 2 {
		l.send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Nack{Nack: &protocol.Nack{
			Document: "leases",
			Reason:   protocol.RefusalUnavailable,
		}}})
		// Its acknowledgement comes after the refusal was taken in.
		l.report(state)
		require.NoError(t, h.dispatcher.SyncAll(t.Context()))
		again := next(l, func(m *protocol.HubMessage) (*protocol.LeaseBatch, bool) {
			if m.GetPushLeases() == nil {
				return nil, false
			}
			v, err := protocol.VerifyLeases(m.GetPushLeases().GetEnvelope(), n.bundle, n.me)
			require.NoError(t, err)
			return v.Message(), true
		})
		require.Equal(t, lease.GetLeaseNo(), again.GetLeases()[0].GetLeaseNo())
	}
}

func TestAnEmptyWalletRenewsNothingAndStopsNothing(t *testing.T) {
	h := newHub(t)
	h.publish()
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	_, _, first := running(t, h, l)
	tx(h, func(ctx context.Context, tx db.Tx) (int, error) {
		_, err := tx.Exec(ctx, `UPDATE wallets SET balance_nanos = 0`)
		return 0, err
	})
	h.forward(50 * time.Minute)
	require.NoError(t, h.dispatcher.Renew(t.Context()), "one empty wallet is no trouble of the pass")
	leases := tx(h, func(ctx context.Context, tx db.Tx) ([]*protocol.Lease, error) {
		return ledger.LeasesFor(ctx, tx, n.id)
	})
	require.Equal(t, first.GetLeaseNo(), leases[0].GetLeaseNo())
	state, _ := n.connect(hello("i2")).state(1)
	require.Len(t, state.GetParts(), 1, "the workload stays wanted; its lease ends it")
}

// A stopped instance costs no lease and, once its last one has ended, only what may still come; starting it gives it a
// new one.
func TestAStoppedInstanceHoldsNoMoreThanItMayStillSpend(t *testing.T) {
	h := newHub(t)
	h.publish()
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	i, member, lease := running(t, h, l)
	start := h.now()
	h.forward(time.Minute)
	require.Empty(t, upload(t, l.usage(), n.segments("i1", []*protocol.UsageRecord{seconds(member, lease, start, 60)})[0]).
		GetNackReason())
	_, err := (&command.Service{DB: h.d, EnqueueNode: h.dispatcher.Enqueue}).StopInstance(t.Context(), h.tenant("stop"),
		h.project.ID,
		i.ID)
	require.NoError(t, err)
	state, _ := l.state(1)
	stopped := &protocol.WorkloadStatus{MemberId: member, InstanceId: i.ID, Revision: 1, Status: "stopped"}
	wallet := func() int { return count(h, `SELECT balance_nanos / 1000000 FROM wallets`) }
	before := wallet()
	for range 48 {
		l.report(state.GetGeneration(), stopped)
		require.NoError(t, h.dispatcher.Renew(t.Context()))
		h.forward(30 * time.Minute)
	}
	require.Equal(t, 1, count(h, `SELECT count(*) FROM leases`))
	require.Greater(t, wallet(), before)
	require.Greater(t, wallet(), 999_000, "of 1000, a minute is spent and a quarter of an hour is held at most")

	_, err = (&command.Service{
		DB: h.d, LeaseDuration: time.Hour, Bundle: h.keys.Bundle,
		EnqueueNode: h.dispatcher.Enqueue,
	}).
		StartInstance(t.Context(), h.tenant("start"), h.project.ID, i.ID)
	require.NoError(t, err)
	require.Equal(t, 2, count(h, `SELECT count(*) FROM leases`))
	require.Less(t, wallet(), before+100)
	h.forward(40 * time.Minute)
	require.NoError(t, h.dispatcher.Renew(t.Context()))
	require.Equal(t, 3, count(h, `SELECT count(*) FROM leases`), "it is to run: its lease is renewed")
}

// One member that breaks a rule keeps neither its neighbours' documents nor anybody's leases from its node.
func TestAMemberThatBreaksARuleKeepsNoLeaseAndNoNeighbourFromItsNode(t *testing.T) {
	h := newHub(t)
	h.publish()
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	broken, _, first := running(t, h, l)
	tx(h, func(ctx context.Context, tx db.Tx) (int, error) {
		_, err := tx.Exec(ctx, `UPDATE instance_revisions SET manifest_envelope = '\xffff' WHERE instance_id = $1`, broken.ID)
		return 0, err
	})
	made := h.launch()
	state, push := l.state(2)
	require.Len(t, push.GetParts(), 2, "the broken one's last document stands")
	require.Equal(t, broken.Members[0].ID, h.findings()[finding.Member])
	l.report(state.GetGeneration(), ready(made))
	h.forward(40 * time.Minute)
	require.NoError(t, h.dispatcher.Renew(t.Context()))
	next(l, func(m *protocol.HubMessage) (bool, bool) {
		if m.GetPushLeases() == nil {
			return false, false
		}
		v, err := protocol.VerifyLeases(m.GetPushLeases().GetEnvelope(), n.bundle, n.me)
		require.NoError(t, err)
		for _, lease := range v.Message().GetLeases() {
			if lease.GetMemberId() == first.GetMemberId() && lease.GetLeaseNo() > first.GetLeaseNo() {
				return true, true
			}
		}
		return false, false
	})
	h.decommission(broken.ID)
	l.state(1)
	require.Empty(t, h.findings())
}

func TestAHubThatWasAwayGivesNodesTimeToComeBack(t *testing.T) {
	h := newHub(t)
	n := h.enrol()
	n.connect(hello("i1")).state(0)
	h.forward(time.Hour)
	h.nodes.Started = h.now()
	require.NoError(t, h.nodes.Sweep(t.Context()))
	require.Equal(t, 0, count(h, `SELECT count(*) FROM events WHERE type = 'fleet.node.offline'`))
	h.forward(fleet.OnlineWindow)
	require.NoError(t, h.nodes.Sweep(t.Context()))
	require.Equal(t, 1, count(h, `SELECT count(*) FROM events WHERE type = 'fleet.node.offline'`))
}

// The periodic pass skips a node that holds the latest leases, and only such a one.
func TestNodesThatHoldTheLatestLeasesAreUpToDate(t *testing.T) {
	h := newHub(t)
	h.publish()
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	running(t, h, l)
	acked, connected := h.server.Acked(n.id)
	require.True(t, connected)
	upToDate := func(acked nodelink.AckedState) bool {
		return tx(h, func(ctx context.Context, tx db.Tx) (map[string]bool, error) {
			return h.dispatcher.UpToDate(ctx, tx, []nodelink.AckedState{acked})
		})[n.id]
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
	h.forward(40 * time.Minute)
	require.NoError(t, h.dispatcher.Renew(t.Context()))
	require.False(t, upToDate(acked), "there is a newer lease")
}

// What runs goes on while no state can be made: leases come first.
func TestLeasesReachANodeWhoseStateCannotBeMade(t *testing.T) {
	h := newHub(t)
	h.publish()
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	_, _, first := running(t, h, l)
	newest := func() uint64 {
		return tx(h, func(ctx context.Context, tx db.Tx) (uint64, error) { return dispatch.NewestGeneration(ctx, tx, n.id) })
	}
	before := newest()
	tx(h, func(ctx context.Context, tx db.Tx) (int, error) {
		_, err := tx.Exec(ctx, fmt.Sprintf(`ALTER TABLE node_states ADD CONSTRAINT none_made CHECK (generation <= %d)`,
			before))
		return 0, err
	})
	h.forward(40 * time.Minute)
	h.launch()
	require.NoError(t, h.dispatcher.Renew(t.Context()))
	next(l, func(m *protocol.HubMessage) (bool, bool) {
		if m.GetPushLeases() == nil {
			return false, false
		}
		v, err := protocol.VerifyLeases(m.GetPushLeases().GetEnvelope(), n.bundle, n.me)
		require.NoError(t, err)
		return true, slices.ContainsFunc(v.Message().GetLeases(), func(lease *protocol.Lease) bool {
			return lease.GetMemberId() == first.GetMemberId() && lease.GetLeaseNo() > first.GetLeaseNo()
		})
	})
	require.Equal(t, before, newest())
}

// An instance that failed costs as little as one that was stopped, however long its node goes on to report the failure.
func TestAFailedInstanceHoldsNoMoreThanItMayStillSpend(t *testing.T) {
	h := newHub(t)
	h.publish()
	l := h.enrol().connect(hello("i1"))
	l.state(0)
	i := h.launch()
	state, _ := l.state(1)
	failed := &protocol.WorkloadStatus{
		MemberId: i.Members[0].ID, InstanceId: i.ID, Revision: 1, Status: "failed",
		Reason: string(instance.ReasonManifestNotAdmitted),
	}
	l.report(state.GetGeneration(), failed)
	h.forward(time.Minute)
	l.report(state.GetGeneration(), failed)
	require.Equal(t, 1, count(h, `SELECT count(*) FROM app_instances WHERE status = 'failed'`))
	h.aDayOf(l, state.GetGeneration(), failed)
	require.Equal(t, 1, count(h, `SELECT count(*) FROM leases`))
	require.Greater(t, h.wallet(), 999_000, "of 1000, a quarter of an hour is held at most")
}

// A running instance whose node waits for its owner is to run: its lease is renewed, and what its hold does not need
// goes back.
func TestAWaitingInstanceHoldsOneLease(t *testing.T) {
	h := newHub(t)
	h.publish()
	l := h.enrol().connect(hello("i1"))
	l.state(0)
	i, member, _ := running(t, h, l)
	h.aDayOf(l, 2, &protocol.WorkloadStatus{
		MemberId: member, InstanceId: i.ID, Revision: 1, Status: "failed", Reason: string(instance.ReasonOwnerRefused),
	})
	require.Equal(t, 1, count(h, `SELECT count(*) FROM app_instances WHERE status = 'running'`))
	require.Greater(t, count(h, `SELECT count(*) FROM leases`), 20)
	require.Greater(t, h.wallet(), 995_000, "of 1000, an hour and a quarter are held at most")
}

// aDayOf has a node repeat a report all day.
func (h *hub) aDayOf(l *line, generation uint64, status *protocol.WorkloadStatus) {
	h.t.Helper()
	for range 48 {
		l.report(generation, status)
		require.NoError(h.t, h.dispatcher.Renew(h.t.Context()))
		h.forward(30 * time.Minute)
	}
}

// wallet is in thousandths of the currency.
func (h *hub) wallet() int { return count(h, `SELECT balance_nanos / 1000000 FROM wallets`) }
