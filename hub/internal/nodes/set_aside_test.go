package nodes_test

import (
	"context"
	"crypto/ed25519"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/protocol"
)

func provenGone(i instance.Instance) *protocol.WorkloadStatus {
	return &protocol.WorkloadStatus{
		MemberId: i.Members[0].ID, InstanceId: i.ID, Status: protocol.WorkloadStatus_REMOVED,
		Removal: &protocol.RemovalProof{At: timestamppb.Now(), Absent: protocol.RemovalKinds(), Incarnation: "i1"},
	}
}

// One member whose bill cannot be closed keeps no news of its node's other members from the hub: it is a finding, its
// report is not acknowledged, so that the node repeats its proof, and it is taken over once that is possible.
func TestMemberThatCannotBeTakenOverHoldsUpNoOtherOfItsNode(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	instances := []instance.Instance{h.Launch(), h.Launch(), h.Launch()}
	l.ExpectState(3)
	poisoned, removed, running := instances[1], instances[0], instances[2]
	for _, i := range []instance.Instance{poisoned, removed} {
		h.Decommission(i.ID)
	}
	state, _ := l.ExpectState(1)
	exec := func(query string) {
		t.Helper()
		hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (pgconn.CommandTag, error) { return tx.Exec(ctx, query) })
	}
	exec(`ALTER TABLE subjects ADD CONSTRAINT poison CHECK (closed_at IS NULL OR id <> '` + poisoned.Members[0].ID + `')`)

	statuses := []*protocol.WorkloadStatus{
		provenGone(poisoned), provenGone(removed),
		{
			MemberId: running.Members[0].ID, Status: protocol.WorkloadStatus_READY, Revision: 1, StartedAt: timestamppb.Now(),
			ReadyAt: timestamppb.Now(),
		},
	}
	pub, _ := n.Key.Public().(ed25519.PublicKey)
	peer := nodelink.Peer{NodeID: n.ID, Key: pub}
	report := func() error {
		l.Counter++
		return h.Nodes.Report(t.Context(), peer, l.Welcome.GetSessionNo(), &protocol.Report{
			Counter: l.Counter, At: timestamppb.Now(), Epoch: 1, Generation: state.GetGeneration(), Workloads: statuses,
		})
	}
	require.Error(t, report(), "a report of which a member was set aside is not acknowledged")
	for id, want := range map[string]string{
		poisoned.ID: "decommissioning", removed.ID: "decommissioned",
		running.ID: "running",
	} {
		require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM app_instances WHERE id = $1 AND status = $2`, id, want),
			want)
	}
	require.Zero(t, hubtest.Count(h, `SELECT count(*) FROM instance_members WHERE id = $1 AND removed_at IS NOT NULL`,
		poisoned.Members[0].ID))
	require.Equal(t, poisoned.Members[0].ID, h.Findings()[finding.Report])
	require.Equal(t, 1,
		hubtest.Count(h, `SELECT count(*) FROM events WHERE type = 'hub.recovery.finding' AND subject = $1`,
			poisoned.Members[0].ID))

	require.Error(t, report())
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM events WHERE type = 'hub.recovery.finding'`),
		"the same failure is one finding")

	exec(`ALTER TABLE subjects DROP CONSTRAINT poison`)
	require.NoError(t, report())
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM app_instances WHERE id = $1 AND status = 'decommissioned'`,
		poisoned.ID))
	require.NotContains(t, h.Findings(), finding.Report)
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM events WHERE type = 'hub.recovery.finding_resolved'
		AND subject = $1 AND data ->> 'kind' = 'report_failed'`, poisoned.Members[0].ID))
}

// Law 8: a node that comes back with a report of which one member is set aside counts as online, with its event and its
// audit row; so do its other members.
func TestLaw08ANodeIsBackWithItsEventWhereAMemberIsSetAside(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	poisoned, running := h.Launch(), h.Launch()
	l.ExpectState(2)
	h.Decommission(poisoned.ID)
	state, _ := l.ExpectState(1)
	hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (pgconn.CommandTag, error) {
		return tx.Exec(ctx, `ALTER TABLE subjects ADD CONSTRAINT poison CHECK (closed_at IS NULL)`)
	})
	h.Advance(fleet.OnlineWindow)
	require.NoError(t, h.Nodes.Sweep(t.Context()))
	rows := func() (online, audited int) {
		return hubtest.Count(h, `SELECT count(*) FROM events WHERE type = 'fleet.node.online' AND subject = $1`, n.ID),
			hubtest.Count(h, `SELECT count(*) FROM audit_rows WHERE action = 'fleet.node.contact' AND resource_id = $1`, n.ID)
	}
	online, audited := rows()
	pub, _ := n.Key.Public().(ed25519.PublicKey)
	l.Counter++
	require.Error(t, h.Nodes.Report(t.Context(), nodelink.Peer{NodeID: n.ID, Key: pub}, l.Welcome.GetSessionNo(),
		&protocol.Report{
			Counter: l.Counter, At: timestamppb.Now(), Epoch: 1, Generation: state.GetGeneration(),
			Workloads: []*protocol.WorkloadStatus{provenGone(poisoned), hubtest.Ready(running)},
		}))
	require.True(t, h.NodeRow(n.ID).Reachable)
	onlineNow, auditedNow := rows()
	require.Equal(t, online+1, onlineNow)
	require.Equal(t, audited+1, auditedNow)
	require.Equal(t, lifecycle.HealthHealthy, h.Instance(running.ID).Lifecycle.Health)
}
