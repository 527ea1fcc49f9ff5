package command_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// A member that an external worker operates has all accelerators of its allocation: the limit of the entitlement is for
// the sum, at the launch and later.
func TestAnEntitlementBoundsTheAcceleratorsOfAnExternalWorker(t *testing.T) {
	w := newWorld(t)
	w.reportGPUs()
	w.publishCluster("1.0.0")
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, _, err := catalog.PutEntitlement(ctx, tx, catalog.Entitlement{
			ProjectID: w.Project.ID, OrgID: w.Project.OrgID, AppSlug: "cluster", Enabled: true, UpdatedBy: db.NewID(),
			Policy: catalog.Policy{MaxAccelerators: 1},
		}, w.Now)
		return err
	})
	withGPU := func() capacity.Allocation {
		in := w.AllocationInput()
		in.AcceleratorCount = 1
		a, err := w.Commands().CreateAllocation(t.Context(), w.Meta("gpu"+db.NewID()), in)
		require.NoError(t, err)
		require.Len(t, a.AcceleratorIDs, 1)
		return a
	}
	one, two := withGPU(), withGPU()
	launch := func(key string, allocations ...string) (string, error) {
		i, err := w.Commands().CreateInstance(t.Context(), w.Meta(key), command.CreateInstanceInput{
			ProjectID: w.Project.ID, AppSlug: "cluster", Version: "1.0.0", DisplayName: "c", AllocationIDs: allocations,
			Parameters: map[string]any{"partition": "main"},
		})
		return i.ID, err
	}
	refused := func(pointer string, err error) {
		t.Helper()
		requireCode(t, catalog.CodePolicyRefused, err)
		require.Equal(t, []fault.Field{{Pointer: pointer, Reason: "makes them 2; at most 1 are allowed"}},
			fault.As(err).Fields)
	}
	_, err := launch("both", one.ID, two.ID)
	refused("/placement_intent/allocation_ids", err)
	id, err := launch("one", one.ID)
	require.NoError(t, err)
	i := w.Get(id)
	w.finish(w.next(i, "deploy"))
	_, err = w.addMember(i, two.ID, "gpu")
	refused("/allocation_id", err)
	_, err = w.addMember(i, w.Allocation().ID, "cpu")
	require.NoError(t, err)
}
