package capacity_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/plan"
)

// Where an upgrade has failed, the tenant may return to the revision before, however large that was.
func TestAFailedUpgradeLeavesRoomForTheLargerOfBothSizes(t *testing.T) {
	w := newWorld(t)
	a, err := w.create(func(n *capacity.NewAllocation) { n.CPUCores, n.MemoryMiB = 4, 4096 })
	require.NoError(t, err)
	before := capacity.Use{CPUMillis: 3000, MemoryBytes: 1 << 30}
	next := capacity.Use{CPUMillis: 1000, MemoryBytes: 2 << 30}
	member := db.NewID()
	require.NoError(t, w.try(func(ctx context.Context, tx db.Tx) error {
		return capacity.Reserve(ctx, tx, capacity.Reservation{
			MemberID: member, AllocationID: a.ID, NodeID: a.NodeID,
			Choice: plan.Choice{Need: plan.Need{CPUMillis: 4000, MemoryBytes: 4 << 30}},
		}, w.now())
	}))
	for _, order := range [][2]capacity.Use{{next, before}, {before, next}} {
		require.NoError(t, w.try(func(ctx context.Context, tx db.Tx) error {
			return capacity.SettleEither(ctx, tx, member, order[0], order[1])
		}))
		require.NoError(t, w.try(func(ctx context.Context, tx db.Tx) (err error) {
			a, err = capacity.GetAny(ctx, tx, a.ID)
			return err
		}))
		require.Equal(t, []int64{1000, 2 << 30}, []int64{a.FreeCPUMillis, a.FreeMemoryBytes})
	}
}
