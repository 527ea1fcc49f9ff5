package command_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/fleet/fleettest"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// A report of one node, which writes its session, must not make an allocation on another start afresh, and the other
// way round.
func TestAllocationDoesNotConflictWithReportsOfOtherNodes(t *testing.T) {
	w := newWorld(t)
	other := w.Node
	w.EnrollNode()
	in := w.AllocationInput()
	create := &command.Service{DB: w.DB}
	attempts := 0
	_, err := db.RunTx(t.Context(), w.DB, func(tx db.Tx) (capacity.Allocation, error) {
		attempts++
		// Of a table with two rows PostgreSQL reads, and locks, all.
		if _, err := tx.Exec(t.Context(), `SET LOCAL enable_seqscan = off`); err != nil {
			return capacity.Allocation{}, err
		}
		a, err := create.CreateAllocationOn(t.Context(), tx, w.Meta("allocation"), in, []string{w.Node})
		if attempts == 1 {
			// It sees nothing of the allocation, which sees nothing of it: one of the two would have to start afresh if both
			// had read.
			w.Tx(func(ctx context.Context, tx db.Tx) error {
				var n int
				if err := tx.QueryRow(ctx, `SELECT count(*) FROM allocations`).Scan(&n); err != nil {
					return err
				}
				_, err := tx.Exec(ctx, `UPDATE node_sessions SET report_counter = report_counter + 1 WHERE node_id = $1`, other)
				return err
			})
		}
		return a, err
	})
	require.NoError(t, err)
	require.Equal(t, 1, attempts)
}

func TestCandidateThatIsFullByNowHasNoRoomAndAnotherNodeIsTaken(t *testing.T) {
	w := newWorld(t)
	full := w.Node
	for range 4 {
		w.Allocation()
	}
	create := &command.Service{DB: w.DB}
	_, err := db.RunTx(t.Context(), w.DB, func(tx db.Tx) (capacity.Allocation, error) {
		return create.CreateAllocationOn(t.Context(), tx, w.Meta("stale"), w.AllocationInput(), []string{full})
	})
	require.Equal(t, capacity.CodeInsufficient, fault.As(err).Code)
	_, err = create.CreateAllocation(t.Context(), w.Meta("none"), w.AllocationInput())
	require.Equal(t, capacity.CodeInsufficient, fault.As(err).Code)
	w.EnrollNode()
	a, err := create.CreateAllocation(t.Context(), w.Meta("another"), w.AllocationInput())
	require.NoError(t, err)
	require.Equal(t, w.Node, a.NodeID)
}

// As many at once as there is room for: each finds a place, and none is given twice.
func TestAllocationsAtOnceAllFindRoom(t *testing.T) {
	w := newWorld(t)
	const nodes, each = 6, 4
	for range nodes - 1 {
		w.EnrollNode()
	}
	create := &command.Service{DB: w.DB}
	var group errgroup.Group
	for range nodes * each {
		m := w.Meta("allocation" + db.NewID())
		group.Go(func() error {
			_, err := create.CreateAllocation(t.Context(), m, w.AllocationInput())
			return err
		})
	}
	require.NoError(t, group.Wait())
	_, err := create.CreateAllocation(t.Context(), w.Meta("more"), w.AllocationInput())
	require.Equal(t, capacity.CodeInsufficient, fault.As(err).Code)
}

// What was answered once is answered again, however full the nodes are by now.
func TestAllocationIsAnsweredAgainWhenNoNodeHasRoom(t *testing.T) {
	w := newWorld(t)
	create := &command.Service{DB: w.DB}
	m := w.Meta("first")
	first, err := create.CreateAllocation(t.Context(), m, w.AllocationInput())
	require.NoError(t, err)
	for range 3 {
		w.Allocation()
	}
	again, err := create.CreateAllocation(t.Context(), m, w.AllocationInput())
	require.NoError(t, err)
	require.Equal(t, first.ID, again.ID)
}

// A node whose runtime does not keep orgs apart gets one org's allocations, until its owner or a newer runtime says
// otherwise.
func TestAWeakNodeIsNotGivenToASecondOrg(t *testing.T) {
	w := newWorld(t)
	w.conditions(protocol.ConditionRuncVulnerable)
	w.Allocation()
	w.Allocation()
	other, stranger := w.NewTenant("other")
	ask := func() error {
		m := w.Meta(db.NewID())
		m.Principal = stranger
		in := w.AllocationInput()
		in.ProjectID = other.ID
		return second((&command.Service{DB: w.DB}).CreateAllocation(t.Context(), m, in))
	}
	require.Equal(t, capacity.CodeInsufficient, fault.As(ask()).Code)
	w.conditions(protocol.ConditionRuncVulnerable, protocol.ConditionWeakIsolationShared)
	require.NoError(t, ask(), "its owner shares it")
	w.conditions(protocol.ConditionRuncVulnerable)
	require.Equal(t, capacity.CodeInsufficient, fault.As(ask()).Code)
	w.conditions()
	require.NoError(t, ask())
}

// conditions has the node connect with them.
func (w *world) conditions(list ...string) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, err := fleettest.Connect(ctx, tx, fleet.Connection{NodeID: w.Node, ReplicaID: "r1", Hello: &protocol.Hello{
			Features:    manifest.KnownFeatures(),
			Incarnation: "i1", Facts: &protocol.NodeFacts{Hostname: "n1", CpuCores: 4, MemoryBytes: 8 << 30, Conditions: list},
		}}, w.Now)
		return err
	})
}
