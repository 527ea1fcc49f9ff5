package nodes_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/e2e/sim"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// memberTwin is a hub on PostgreSQL beside the simulation's: users ask both for the same, one node reports to both.
type memberTwin struct {
	t       *testing.T
	rng     *rand.Rand
	hub     *hubtest.Hub
	node    *hubtest.Node
	session *hubtest.Session
	sim     *sim.Hub
	stores  int
	backup  *hubtest.BackupRows
	// advanced is how far the clocks were set; restored says that the hubs were put back to a backup.
	advanced time.Duration
	restored bool
	// epoch is the hub's and epochOfSim the simulation's: a restore begins one, whose number is its time.
	epoch, epochOfSim uint64
	// pairs are the instances, by their order.
	pairs []pair
	seen  map[string]int
}

// pair is an instance of the hub and the simulation's member that stands for it.
type pair struct {
	instance, member, simulated string
}

// TestTheSimulationKeepsMembersAsTheHub has users launch, stop, start and decommission instances at random, and a node
// report anything about them, under any state, revision and status, and with any proof of removal. After each step both
// hubs have the same instances and members, hold the same room for them, and have signed states of the same number.
func TestTheSimulationKeepsMembersAsTheHub(t *testing.T) {
	seen := map[string]int{}
	for seed := range uint64(4) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			w := newMemberTwin(t, seed, seen)
			for range 100 {
				w.compare(w.step())
			}
		})
	}
	t.Log(seen)
	if t.Failed() {
		return
	}
	for _, what := range []string{
		"running", "degraded", "failed", "stopped", "decommissioned", "refused", "confirmed", "proved by silence",
		"restored",
	} {
		require.NotZero(t, seen[what], what)
	}
}

func newMemberTwin(t *testing.T, seed uint64, seen map[string]int) *memberTwin {
	h, n, l := hubtest.NewWithNode(t)
	w := &memberTwin{
		t: t, rng: rand.New(rand.NewPCG(seed, 12)), hub: h, node: n, session: l, sim: sim.NewHub(n.ID), seen: seen,
		stores: 1, epoch: 1, epochOfSim: 1,
	}
	w.sim.Hello(sim.Hello{Incarnation: "i1"})
	w.sim.Report(0, 0, nil) // signs the state without members, as the first session did
	w.sim.Accepted(1, 1)
	return w
}

func (w *memberTwin) step() (what string) {
	live := w.live()
	switch dice := w.rng.IntN(20); {
	case len(live) == 0 || dice < 2 && len(live) < 4:
		i := w.hub.Launch()
		w.pairs = append(w.pairs, pair{i.ID, i.Members[0].ID, w.sim.Launch()})
		return "launch"
	case dice < 5:
		by := []time.Duration{30 * time.Second, 16 * time.Minute}[w.rng.IntN(2)]
		w.hub.Advance(by)
		w.sim.Advance(by)
		w.advanced += by
		// The simulation does not model that a node which is silent for long counts as unreachable.
		return "later by " + by.String() + ", " + w.report()
	case dice < 9:
		return w.command(live[w.rng.IntN(len(live))])
	case dice < 10 && w.backup == nil:
		rows := w.hub.Backup()
		w.backup = &rows
		w.sim.Backup()
		return "a backup"
	case dice < 11 && w.backup != nil && w.stores == 1:
		return w.restore()
	case dice < 11 && w.restored:
		// The node has lost its store: what it does not report is not there.
		w.stores++
		name := fmt.Sprint("i", w.stores)
		w.session = w.node.Connect(hubtest.Hello(name))
		w.sim.Hello(sim.Hello{Incarnation: name})
		return "a new store"
	default:
		return w.report()
	}
}

// live are the instances that have not ended.
func (w *memberTwin) live() (out []pair) {
	for _, p := range w.pairs {
		if !w.sim.Member(p.simulated).Gone {
			out = append(out, p)
		}
	}
	return out
}

func (w *memberTwin) command(p pair) (what string) {
	w.t.Helper()
	s := &command.Service{DB: w.hub.DB, LeaseDuration: time.Hour, Bundle: w.hub.Keys.Bundle}
	acts := []struct {
		name string
		hub  func(context.Context, command.Meta, string, string) (instance.Instance, error)
		sim  func(string) error
	}{
		{"stop", s.StopInstance, w.sim.Stop},
		{"start", s.StartInstance, w.sim.Start},
		{"decommission", s.DecommissionInstance, w.sim.Decommission},
	}
	act := acts[w.rng.IntN(len(acts))]
	_, err := act.hub(w.t.Context(), w.hub.Tenant(act.name+db.NewID()), w.hub.Project.ID, p.instance)
	refused := act.sim(p.simulated)
	require.Equal(w.t, refused == nil, err == nil, "%s: the hub says %v, the simulation %v", act.name, err, refused)
	w.see("refused", err != nil)
	return act.name
}

// report has the node say anything about some of its members, or about all.
func (w *memberTwin) report() (what string) {
	w.t.Helper()
	behind := w.rng.Uint64N(3) / 2
	newest := w.newest()
	var ours, theirs []*protocol.WorkloadStatus
	var unnamed []pair
	for _, p := range w.live() {
		if w.rng.IntN(4) == 0 {
			unnamed = append(unnamed, p)
			continue
		}
		s := w.status(w.sim.Member(p.simulated))
		what += fmt.Sprintf(" %s@%d", s.GetStatus().Text(), s.GetRevision())
		s.MemberId, s.InstanceId = p.member, p.instance
		ours = append(ours, s)
		theirs = append(theirs, &protocol.WorkloadStatus{
			MemberId: p.simulated, InstanceId: p.instance, Revision: s.GetRevision(), Status: s.GetStatus(),
			Reason: s.GetReason(), Removal: s.GetRemoval(),
		})
	}
	w.session.ReportState(&protocol.DesiredState{
		Epoch: newest.GetEpoch(), Generation: newest.GetGeneration() - min(behind, newest.GetGeneration()),
	}, ours...)
	w.sim.Report(w.session.Counter, w.sim.Generation()-min(behind, w.sim.Generation()), theirs)
	for _, p := range unnamed {
		w.see("proved by silence", w.sim.Member(p.simulated).Gone)
	}
	return fmt.Sprintf("report of the newest state but %d:%s", behind, what)
}

// status is any of a member; what has failed is likely to have failed for the same reason again.
func (w *memberTwin) status(m sim.MemberRow) *protocol.WorkloadStatus {
	s := &protocol.WorkloadStatus{
		Revision: m.Revision - min(w.rng.Uint64N(5)/4, m.Revision-1),
		Status:   protocol.WorkloadStatus_Status(1 + w.rng.IntN(8)),
	}
	if m.Status == protocol.WorkloadStatus_FAILED && w.rng.IntN(3) > 0 {
		s.Status, s.Reason, s.Revision = m.Status, m.Reason, uint64(max(m.Observed, 1))
		return s
	}
	switch s.GetStatus() {
	case protocol.WorkloadStatus_FAILED:
		s.Reason = []protocol.WorkloadStatus_Reason{
			protocol.WorkloadStatus_CRASH_LOOP, protocol.WorkloadStatus_INSUFFICIENT_CAPACITY,
			protocol.WorkloadStatus_DEVICE_FAULT, protocol.WorkloadStatus_READINESS_TIMEOUT,
		}[w.rng.IntN(4)]
	case protocol.WorkloadStatus_REMOVED:
		s.Removal = &protocol.RemovalProof{
			At: timestamppb.New(w.hub.Now()), Absent: protocol.RemovalKinds(), Incarnation: "i1",
		}
		if w.rng.IntN(3) == 0 {
			s.Removal.Absent = s.Removal.GetAbsent()[1:]
		}
	default:
	}
	return s
}

func (w *memberTwin) see(what string, happened bool) {
	if happened {
		w.seen[what]++
	}
}

// newest is the number of the hub's newest state.
func (w *memberTwin) newest() *protocol.DesiredState {
	w.t.Helper()
	return hubtest.Tx(w.hub, func(ctx context.Context, tx db.Tx) (*protocol.DesiredState, error) {
		s := &protocol.DesiredState{}
		return s, tx.QueryRow(ctx, `SELECT epoch, generation FROM node_states ORDER BY epoch DESC, generation DESC LIMIT 1`).
			Scan(&s.Epoch, &s.Generation)
	})
}

// restore puts both hubs back to the backup; the node, which has the newest state and leases, uploads them.
func (w *memberTwin) restore() string {
	w.t.Helper()
	state, parts := w.held()
	leases := w.hub.SignedLeases(w.session)
	require.NoError(w.t, w.session.Conn.Close(link.CodeOK, ""))
	w.hub = w.hub.Restore(*w.backup)
	w.hub.Advance(w.advanced)
	w.node.Hub, w.backup, w.restored = w.hub, nil, true
	v, err := protocol.VerifyState(state, w.node.Bundle, w.node.Identity)
	require.NoError(w.t, err)
	said := hubtest.Hello("i1")
	said.Epoch, said.Generation, said.StateSha256 = v.Message().GetEpoch(), v.Message().GetGeneration(),
		hubtest.Sha(state.GetPayload())
	w.session = w.node.Connect(said)
	w.session.UploadState(&protocol.StateUpload{
		State: state, Parts: parts, Leases: []*protocol.Envelope{leases}, Bundle: w.node.Bundle.Envelope(), Last: true,
	})
	bundle := hubtest.Next(w.session, func(m *protocol.HubMessage) (*protocol.Envelope, bool) {
		return m.GetPushBundle().GetEnvelope(), m.GetPushBundle() != nil
	})
	w.node.Bundle, err = w.node.Bundle.Succeed(bundle)
	require.NoError(w.t, err)
	w.session.Ack(protocol.Envelope_BUNDLE, 0, w.node.Bundle.Version())

	up, err := w.sim.Newest()
	require.NoError(w.t, err)
	hello := sim.Hello{Incarnation: "i1", Epoch: w.sim.Epoch(), Generation: w.sim.Generation()}
	w.sim.Restore()
	w.sim.Hello(hello)
	w.sim.UploadState(up)
	w.see("restored", true)
	require.Greater(w.t, w.node.Bundle.Epoch(), w.epoch)
	require.Greater(w.t, w.sim.Epoch(), w.epochOfSim)
	w.epoch, w.epochOfSim = w.node.Bundle.Epoch(), w.sim.Epoch()
	w.pairs = slices.DeleteFunc(w.pairs, func(p pair) bool {
		known := hubtest.Count(w.hub, `SELECT count(*) FROM instance_members WHERE id = $1`, p.member) == 1
		require.Equal(w.t, w.sim.Knows(p.simulated), known, "a member that came and went since the backup")
		return !known
	})
	return "a restore"
}

// held is the newest state with its documents, as the node holds it.
func (w *memberTwin) held() (state *protocol.Envelope, parts [][]byte) {
	w.t.Helper()
	hubtest.Tx(w.hub, func(ctx context.Context, tx db.Tx) (int, error) {
		var raw, part []byte
		err := tx.QueryRow(ctx, `SELECT envelope FROM node_states ORDER BY epoch DESC, generation DESC LIMIT 1`).Scan(&raw)
		if err != nil {
			return 0, err
		}
		state = &protocol.Envelope{}
		if err := proto.Unmarshal(raw, state); err != nil {
			return 0, err
		}
		v := &protocol.DesiredState{}
		if err := proto.Unmarshal(state.GetPayload(), v); err != nil {
			return 0, err
		}
		for _, ref := range v.GetParts() {
			if err := tx.QueryRow(ctx, `SELECT data FROM node_state_parts WHERE sha256 = $1`, ref.GetSha256()).
				Scan(&part); err != nil {
				return 0, err
			}
			parts = append(parts, part)
		}
		return 0, nil
	})
	return state, parts
}

// compare waits until the hub has signed what it intends, and compares all rows.
func (w *memberTwin) compare(after string) {
	w.t.Helper()
	require.Eventually(w.t, func() bool {
		newest := w.newest()
		return hubtest.Count(w.hub, `SELECT count(*) FROM node_states s JOIN node_intents i ON i.node_id = s.node_id
			AND i.rev = s.rev WHERE s.epoch = $1 AND s.generation = $2`, newest.GetEpoch(), newest.GetGeneration()) == 1
	}, hubtest.Bound, time.Millisecond, "the hub has signed no state of its intent")
	newest := w.newest()
	require.Equal(w.t, w.epoch, newest.GetEpoch(), "after %s", after)
	require.Equal(w.t, w.epochOfSim, w.sim.Epoch(), "after %s", after)
	require.Equal(w.t, w.sim.Generation(), newest.GetGeneration(), "after %s", after)
	for _, p := range w.pairs {
		want := w.sim.Member(p.simulated)
		i := w.hub.Instance(p.instance)
		m := i.Members[0]
		got := sim.MemberRow{
			Instance: i.Lifecycle, Revision: uint64(i.Revision), Status: m.Status, Reason: m.Reason,
			Observed: m.ObservedRevision, Confirmed: m.FailureConfirmed, Gone: m.Gone,
			AbsentGeneration: uint64(hubtest.Count(w.hub, `SELECT coalesce(absent_generation, 0) FROM instance_members
				WHERE id = $1`, m.ID)),
			HoldsRoom: hubtest.Count(w.hub, `SELECT count(*) FROM reservations WHERE member_id = $1 AND freed_at IS NULL`,
				m.ID) == 1,
		}
		require.Equal(w.t, want, got, "after %s", after)
		w.seen[string(got.Instance.Status)]++
		w.seen[string(got.Instance.Health)]++
		w.see("confirmed", got.Confirmed)
	}
}
