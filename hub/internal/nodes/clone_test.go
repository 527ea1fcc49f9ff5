package nodes_test

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
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// machine is one of several that hold the same disk: what its process knows of its last session is its own.
type machine struct {
	*hubtest.Node
	incarnation string
	last        uint64
}

// connect says hello as the machine's process would.
func (m *machine) connect(change func(*protocol.Hello)) *hubtest.Session {
	m.Hub.T.Helper()
	said := hubtest.Hello(m.incarnation)
	said.LastSession = m.last
	if change != nil {
		change(said)
	}
	l := m.Connect(said)
	m.last = l.Welcome.GetSessionNo()
	return l
}

// cloned connects two machines with copies of one disk by turns, until the node is quarantined. It
// returns the second one.
func cloned(t *testing.T, h *hubtest.Hub, n *hubtest.Node, first *machine, acked func(*protocol.Hello),
	statuses ...*protocol.WorkloadStatus,
) (second *machine) {
	t.Helper()
	second = &machine{Node: n, incarnation: first.incarnation}
	var generation uint64
	if acked != nil {
		hello := &protocol.Hello{}
		acked(hello)
		generation = hello.GetGeneration()
	}
	two := second.connect(acked)
	two.Report(generation, statuses...)
	require.Equal(t, fleet.Online, h.NodeRow(n.ID).Status(h.Now()), "a process that starts anew is no second machine")
	back := first.connect(acked)
	back.TryReport(generation, statuses...)
	<-back.Conn.Done()
	require.Equal(t, fleet.Quarantined, h.NodeRow(n.ID).Status(h.Now()))
	return second
}

func newestGeneration(h *hubtest.Hub, n *hubtest.Node) uint64 {
	return hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (uint64, error) {
		return dispatch.NewestGeneration(ctx, tx, n.ID)
	})
}

// requireNothingNew requires that a quarantined node gets no state, no lease and no allocation.
func requireNothingNew(t *testing.T, h *hubtest.Hub, n *hubtest.Node, i instance.Instance) {
	t.Helper()
	newest, leases := newestGeneration(h, n), hubtest.Count(h, `SELECT count(*) FROM leases`)
	h.Decommission(i.ID)
	h.Advance(40 * time.Minute)
	require.NoError(t, h.Dispatcher.SyncAll(t.Context()))
	require.Equal(t, newest, newestGeneration(h, n))
	require.Equal(t, leases, hubtest.Count(h, `SELECT count(*) FROM leases`))
	_, err := (&command.Service{DB: h.DB}).CreateAllocation(t.Context(), h.Tenant("another"),
		capacity.NewAllocation{
			ProjectID: h.Project.ID, NodeID: n.ID, Shape: capacity.GPUSlice, CPUCores: 1, MemoryMiB: 64,
		})
	require.True(t, fault.Is(err, fault.Conflict), "%v", err)
}

func TestLaw05AClonedNodeIsQuarantinedAndBilledOnce(t *testing.T) {
	h := hubtest.New(t)
	h.PublishDemo()
	n := h.Enroll()
	first := &machine{Node: n, incarnation: "i1"}
	l := first.connect(nil)
	l.ExpectState(0)
	i, member, lease := hubtest.Running(t, h, l)
	acked := func(said *protocol.Hello) {
		said.Epoch, said.Generation = 1, newestGeneration(h, n)
	}
	start := h.Now().Truncate(time.Microsecond)
	h.Advance(10 * time.Minute)
	second := cloned(t, h, n, first, acked, &protocol.WorkloadStatus{
		MemberId: member, InstanceId: i.ID, Revision: 1,
		Status: protocol.WorkloadStatus_READY,
	})

	// Both learn it each time they connect.
	one := first.connect(acked)
	require.Equal(t, fleet.ReasonIdentityUsedTwice, one.Welcome.GetQuarantineReason())
	require.False(t, one.Welcome.GetNewIncarnation(), "it goes on as it is until it is released")
	// The usage of both is posted, and each second is billed once: the first sealed 60 s, the second other 90 s of the
	// same time.
	sealed := n.Seal("i1", []*protocol.UsageRecord{hubtest.SessionSeconds(member, lease, start, 60)})[0]
	require.Empty(t, hubtest.Upload(t, one.OpenUsage(), sealed).GetNackReason())
	two := second.connect(acked)
	require.Equal(t, fleet.ReasonIdentityUsedTwice, two.Welcome.GetQuarantineReason())
	fork := n.Seal("i1", []*protocol.UsageRecord{hubtest.SessionSeconds(member, lease, start, 90)})[0]
	require.Equal(t, protocol.Nack_CHAIN_BROKEN, hubtest.Upload(t, two.OpenUsage(), fork).GetNackReason())
	second.incarnation = "i2"
	two = second.connect(acked)
	anew := n.Seal("i2", []*protocol.UsageRecord{hubtest.SessionSeconds(member, lease, start, 90)})[0]
	require.Empty(t, hubtest.Upload(t, two.OpenUsage(), anew).GetNackReason())
	require.Equal(t, int64(90*1_000_000), revenue(h))

	newest := newestGeneration(h, n)
	requireNothingNew(t, h, n, i)
	refused := two.Fetch(&protocol.FetchRequest{Request: &protocol.FetchRequest_PullCredential{
		PullCredential: &protocol.PullCredentialRequest{Repository: hubtest.DemoRepo},
	}})
	require.Equal(t, protocol.Nack_NODE_QUARANTINED, refused.GetErrorReason())
	proof := &protocol.RemovalProof{Absent: protocol.RemovalKinds(), Incarnation: "i2"}
	two.TryReport(newest, &protocol.WorkloadStatus{
		MemberId: member, InstanceId: i.ID,
		Status: protocol.WorkloadStatus_REMOVED, Removal: proof,
	})
	require.NotNil(t, two.Fetch(&protocol.FetchRequest{Request: &protocol.FetchRequest_Bundle{Bundle: true}}).GetBundle(),
		"the session goes on")
	require.Equal(t, 0, hubtest.Count(h, `SELECT count(*) FROM instance_members WHERE removed_at IS NOT NULL`),
		"another machine may still run it")
	require.Equal(t, 1,
		hubtest.Count(h, `SELECT count(*) FROM events WHERE type = 'fleet.node.quarantined' AND subject = $1`,
			n.ID))
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM audit_rows WHERE resource_id = $1 AND reason = $2
		AND before->>'status' = 'online' AND after->>'status' = 'quarantined' AND source_address LIKE '127.%'`, n.ID,
		fleet.ReasonIdentityUsedTwice))

	// The admin stopped the first machine and releases the node: the second continues under a new incarnation.
	release := &command.Service{DB: h.DB}
	require.NoError(t, release.ReleaseNode(t.Context(), h.Admin("release"), n.ID))
	<-two.Conn.Done()
	require.True(t, second.connect(acked).Welcome.GetNewIncarnation())
	second.incarnation = "i3"
	two = second.connect(acked)
	require.False(t, two.Welcome.GetNewIncarnation())
	require.Empty(t, two.Welcome.GetQuarantineReason())
	state, _ := two.ExpectState(0)
	require.Greater(t, state.GetGeneration(), newest)
	two.Report(state.GetGeneration())
	require.Equal(t, fleet.Online, h.NodeRow(n.ID).Status(h.Now()))
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM instance_members WHERE removed_at IS NOT NULL`),
		"the store that was released has nothing of it")
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM events WHERE type = 'fleet.node.released' AND subject = $1`,
		n.ID))
}

// A release while both still run: the copy is noticed again.
func TestAReleasedNodeThatIsStillClonedIsQuarantinedAgain(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	first := &machine{Node: n, incarnation: "i1"}
	l := first.connect(nil)
	l.ExpectState(0)
	l.Report(1)
	acked := func(said *protocol.Hello) { said.Epoch, said.Generation = 1, 1 }
	second := cloned(t, h, n, first, acked)
	require.NoError(t, (&command.Service{DB: h.DB}).ReleaseNode(t.Context(),
		h.Admin("release"),
		n.ID))
	first.incarnation, second.incarnation = "i3", "i4"
	first.connect(acked).Report(1)
	require.Equal(t, fleet.Online, h.NodeRow(n.ID).Status(h.Now()))
	back := second.connect(acked)
	back.TryReport(1)
	<-back.Conn.Done()
	require.Equal(t, fleet.Quarantined, h.NodeRow(n.ID).Status(h.Now()))
	require.Equal(t, 2, hubtest.Count(h, `SELECT count(*) FROM events WHERE type = 'fleet.node.quarantined'`))
}

// A node's disk has forgotten a member, by another name: that it says nothing of it ends the member, and frees what was
// acked.
func TestLaw13ANodeThatForgotAMemberLetsItsInstanceEnd(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	i, member, _ := hubtest.Running(t, h, l)
	h.Decommission(i.ID)
	state, _ := l.ExpectState(0)
	l.Report(state.GetGeneration())
	gone := func() int {
		return hubtest.Count(h, `SELECT count(*) FROM instance_members WHERE removed_at IS NOT NULL`)
	}
	require.Equal(t, 0, gone(), "the store that spoke of it owes its proof")

	forgot := hubtest.Hello("i2")
	forgot.Epoch, forgot.Generation, forgot.StateSha256 = 1, state.GetGeneration()-1, hubtest.Sha([]byte("an older one"))
	l = n.Connect(forgot)
	l.Report(state.GetGeneration() - 1)
	require.Equal(t, 0, gone(), "it has not reported under the state without the member")
	l.Report(state.GetGeneration())
	require.Equal(t, 1, gone())
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM app_instances WHERE id = $1 AND status = 'decommissioned'`,
		i.ID))
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM subjects WHERE id = $1 AND settled_at IS NOT NULL`, member))
	require.Equal(t, 1000*1_000_000_000, hubtest.Count(h, `SELECT balance_nanos FROM wallets`), "the hold is back")
}
