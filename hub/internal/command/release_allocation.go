package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
)

// ReleaseAllocation gives capacity back. It answers with the allocation, released or, while something still has to be
// removed from the node, releasing.
func (s *Service) ReleaseAllocation(ctx context.Context, m Meta, projectID,
	allocationID string,
) (capacity.Allocation, error) {
	return db.RunTx(ctx, s.DB, func(tx db.Tx) (capacity.Allocation, error) {
		return s.releaseAllocation(ctx, tx, m, projectID, allocationID)
	})
}

func (s *Service) releaseAllocation(ctx context.Context, tx db.Tx, m Meta, projectID,
	allocationID string,
) (capacity.Allocation, error) {
	project, err := iam.InProject(ctx, tx, m.Principal, iam.AllocationRelease, projectID)
	if err != nil {
		return capacity.Allocation{}, err
	}
	return Idempotent(ctx, tx, m, func() (capacity.Allocation, error) {
		before, err := capacity.Get(ctx, tx, project.ID, allocationID)
		if err != nil {
			return capacity.Allocation{}, err
		}
		live, err := instance.LiveInAllocation(ctx, tx, before.ID)
		if err != nil {
			return capacity.Allocation{}, err
		}
		return m.ReleaseAllocation(ctx, tx, before, len(live))
	})
}

// ReleaseAllocation gives an allocation back and ends its bill once it is free.
func (m Meta) ReleaseAllocation(ctx context.Context, tx db.Tx, before capacity.Allocation,
	live int,
) (capacity.Allocation, error) {
	after, err := capacity.Release(ctx, tx, before, live, m.Now)
	if err != nil {
		return capacity.Allocation{}, err
	}
	if after.Status == capacity.Released {
		if err := ledger.CloseSubject(ctx, tx, after.ID, m.Now, m.Now); err != nil {
			return capacity.Allocation{}, err
		}
	}
	return after, m.RecordAllocation(ctx, tx, iam.AllocationRelease, before.Status, after)
}
