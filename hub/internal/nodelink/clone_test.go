package nodelink_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/dispatch"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// machine is one of several that hold the same disk: what its process knows of its last session is its own.
type machine struct {
	*node
	incarnation string
	last        uint64
}

// connect says hello as the machine's process would.
func (m *machine) connect(change func(*protocol.Hello)) *line {
	m.h.t.Helper()
	said := hello(m.incarnation)
	said.LastSession = m.last
	if change != nil {
		change(said)
	}
	l := m.node.connect(said)
	m.last = l.welcome.GetSessionNo()
	return l
}

// speak reports without waiting for the answer, which a quarantined node does not get.
func (l *line) speak(generation uint64, statuses ...*protocol.WorkloadStatus) {
	l.t.Helper()
	l.counter++
	l.send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Report{Report: &protocol.Report{
		Counter: l.counter,
		Epoch:   1, Generation: generation, Workloads: statuses,
	}}})
}

// cloned brings two machines with one disk into quarantine: the first was there, the second came, the first came back.
// It returns them with the lines on which each learns of the quarantine.
func cloned(t *testing.T, h *hub, n *node, first *machine, held func(*protocol.Hello),
	statuses ...*protocol.WorkloadStatus,
) (second *machine) {
	t.Helper()
	second = &machine{node: n, incarnation: first.incarnation}
	two := second.connect(held)
	two.report(two.generation(held), statuses...)
	require.Equal(t, fleet.Online, h.node(n.id).Status(h.now()), "a process that starts anew is no second machine")
	back := first.connect(held)
	back.speak(back.generation(held), statuses...)
	<-back.conn.Done()
	require.Equal(t, fleet.Quarantined, h.node(n.id).Status(h.now()))
	return second
}

// generation is what a hello says it holds.
func (l *line) generation(held func(*protocol.Hello)) uint64 {
	said := &protocol.Hello{}
	if held != nil {
		held(said)
	}
	return said.GetGeneration()
}

func TestLaw05AClonedNodeIsQuarantinedAndBilledOnce(t *testing.T) {
	h := newHub(t)
	h.publish()
	n := h.enrol()
	first := &machine{node: n, incarnation: "i1"}
	l := first.connect(nil)
	l.state(0)
	i, member, lease := running(t, h, l)
	held := func(said *protocol.Hello) {
		said.Epoch, said.Generation = 1, tx(h, func(ctx context.Context, tx db.Tx) (uint64, error) {
			return dispatch.NewestGeneration(ctx, tx, n.id)
		})
	}
	start := h.now().Truncate(time.Microsecond)
	h.forward(10 * time.Minute)
	second := cloned(t, h, n, first, held, &protocol.WorkloadStatus{
		MemberId: member, InstanceId: i.ID, Revision: 1,
		Status: "ready",
	})

	// Both are told, each time they dial.
	one := first.connect(held)
	require.Equal(t, fleet.ReasonIdentityUsedTwice, one.welcome.GetQuarantineReason())
	require.False(t, one.welcome.GetNewIncarnation(), "it goes on as it is until it is released")
	// The usage of both is taken, and each second is billed once: the first sealed 60 s, the second other 90 s of the same
	// time.
	require.Empty(t,
		upload(t, one.usage(), n.segments("i1", []*protocol.UsageRecord{seconds(member, lease, start, 60)})[0]).
			GetNackReason())
	two := second.connect(held)
	require.Equal(t, fleet.ReasonIdentityUsedTwice, two.welcome.GetQuarantineReason())
	fork := n.segments("i1", []*protocol.UsageRecord{seconds(member, lease, start, 90)})[0]
	require.Equal(t, protocol.RefusalChainBroken, upload(t, two.usage(), fork).GetNackReason())
	second.incarnation = "i2"
	two = second.connect(held)
	anew := n.segments("i2", []*protocol.UsageRecord{seconds(member, lease, start, 90)})[0]
	require.Empty(t, upload(t, two.usage(), anew).GetNackReason())
	require.Equal(t, int64(90*1_000_000), revenue(h))

	// Nothing new: no state, no lease, no place, no credential; no word of either counts.
	newest := tx(h, func(ctx context.Context, tx db.Tx) (uint64, error) {
		return dispatch.NewestGeneration(ctx, tx, n.id)
	})
	leases := count(h, `SELECT count(*) FROM leases`)
	h.decommission(i.ID)
	h.forward(40 * time.Minute)
	require.NoError(t, h.dispatcher.SyncAll(t.Context()))
	require.Equal(t, newest, tx(h, func(ctx context.Context, tx db.Tx) (uint64, error) {
		return dispatch.NewestGeneration(ctx, tx, n.id)
	}))
	require.Equal(t, leases, count(h, `SELECT count(*) FROM leases`))
	_, err := (&command.Service{DB: h.d}).CreateAllocation(t.Context(), h.tenant("another"), command.CreateAllocationInput{
		ProjectID: h.project.ID, NodeID: n.id, Shape: capacity.GPUSlice, CPUCores: 1, MemoryMiB: 64,
	})
	require.True(t, fault.Is(err, fault.Conflict), "%v", err)
	refused := two.fetch(&protocol.FetchRequest{Request: &protocol.FetchRequest_PullCredential{
		PullCredential: &protocol.PullCredentialRequest{Repository: demoRepo},
	}})
	require.Equal(t, protocol.RefusalQuarantined, refused.GetErrorReason())
	proof := &protocol.RemovalProof{Absent: protocol.RemovalKinds(), Incarnation: "i2"}
	two.speak(newest, &protocol.WorkloadStatus{MemberId: member, InstanceId: i.ID, Status: "removed", Removal: proof})
	require.NotNil(t, two.fetch(&protocol.FetchRequest{Request: &protocol.FetchRequest_Bundle{Bundle: true}}).GetBundle(),
		"the session goes on")
	require.Equal(t, 0, count(h, `SELECT count(*) FROM instance_members WHERE removed_at IS NOT NULL`),
		"another machine may still run it")
	require.Equal(t, 1, count(h, `SELECT count(*) FROM events WHERE type = 'fleet.node.quarantined' AND subject = $1`,
		n.id))
	require.Equal(t, 1, count(h, `SELECT count(*) FROM audit_rows WHERE resource_id = $1 AND reason = $2`, n.id,
		fleet.ReasonIdentityUsedTwice))

	// The admin has shut the first down and releases the node: the second goes on under a new incarnation, and is heard.
	release := &command.Service{DB: h.d, Disconnect: h.server.Disconnect}
	require.NoError(t, release.ReleaseNode(t.Context(), h.admin("release"), n.id))
	<-two.conn.Done()
	require.True(t, second.connect(held).welcome.GetNewIncarnation())
	second.incarnation = "i3"
	two = second.connect(held)
	require.False(t, two.welcome.GetNewIncarnation())
	require.Empty(t, two.welcome.GetQuarantineReason())
	state, _ := two.state(0)
	require.Greater(t, state.GetGeneration(), newest)
	two.report(state.GetGeneration())
	require.Equal(t, fleet.Online, h.node(n.id).Status(h.now()))
	require.Equal(t, 1, count(h, `SELECT count(*) FROM instance_members WHERE removed_at IS NOT NULL`),
		"the store that was released has nothing of it")
	require.Equal(t, 1, count(h, `SELECT count(*) FROM events WHERE type = 'fleet.node.released' AND subject = $1`, n.id))
}

// A release while both still run: the copy is noticed again.
func TestAReleasedNodeThatIsStillClonedIsQuarantinedAgain(t *testing.T) {
	h := newHub(t)
	n := h.enrol()
	first := &machine{node: n, incarnation: "i1"}
	l := first.connect(nil)
	l.state(0)
	l.report(1)
	held := func(said *protocol.Hello) { said.Epoch, said.Generation = 1, 1 }
	second := cloned(t, h, n, first, held)
	require.NoError(t, (&command.Service{DB: h.d, Disconnect: h.server.Disconnect}).ReleaseNode(t.Context(),
		h.admin("release"),
		n.id))
	first.incarnation, second.incarnation = "i3", "i4"
	first.connect(held).report(1)
	require.Equal(t, fleet.Online, h.node(n.id).Status(h.now()))
	back := second.connect(held)
	back.speak(1)
	<-back.conn.Done()
	require.Equal(t, fleet.Quarantined, h.node(n.id).Status(h.now()))
	require.Equal(t, 2, count(h, `SELECT count(*) FROM events WHERE type = 'fleet.node.quarantined'`))
}

// A node's disk has forgotten a member, by another name: that it says nothing of it ends the member, and frees what was
// held.
func TestLaw13ANodeThatForgotAMemberLetsItsInstanceEnd(t *testing.T) {
	h := newHub(t)
	h.publish()
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	i, member, _ := running(t, h, l)
	h.decommission(i.ID)
	state, _ := l.state(0)
	l.report(state.GetGeneration())
	gone := func() int { return count(h, `SELECT count(*) FROM instance_members WHERE removed_at IS NOT NULL`) }
	require.Equal(t, 0, gone(), "the store that spoke of it owes its proof")

	forgot := hello("i2")
	forgot.Epoch, forgot.Generation, forgot.StateSha256 = 1, state.GetGeneration()-1, sha([]byte("an older one"))
	l = n.connect(forgot)
	l.report(state.GetGeneration() - 1)
	require.Equal(t, 0, gone(), "it has not looked under the state without the member")
	l.report(state.GetGeneration())
	require.Equal(t, 1, gone())
	require.Equal(t, 1, count(h, `SELECT count(*) FROM app_instances WHERE id = $1 AND status = 'decommissioned'`, i.ID))
	require.Equal(t, 1, count(h, `SELECT count(*) FROM subjects WHERE id = $1 AND settled_at IS NOT NULL`, member))
	require.Equal(t, 1000*1_000_000_000, count(h, `SELECT balance_nanos FROM wallets`), "the hold is back")
}
