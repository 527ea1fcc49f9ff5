package query

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// Allocations lists a project's allocations, the newest first.
func (s *Service) Allocations(ctx context.Context, p iam.Principal, f capacity.Filter) ([]capacity.Allocation, error) {
	return list(ctx, s, access.Project(p, iam.AllocationRead, f.ProjectID), capacity.List, f)
}

// Allocation reads one allocation.
func (s *Service) Allocation(ctx context.Context, p iam.Principal, projectID, id string,
	w Watch,
) (capacity.Allocation, error) {
	return await(ctx, s, id, w, func() (capacity.Allocation, int64, error) {
		a, err := read(ctx, s, access.Project(p, iam.AllocationRead, projectID),
			func(tx db.Tx, project iam.Project) (capacity.Allocation, error) {
				return capacity.Get(ctx, tx, project.ID, id)
			})
		return a, a.ResourceVersion, err
	})
}

// SKUs lists the named sizes of allocations.
func (s *Service) SKUs(ctx context.Context, p iam.Principal, page db.Page) ([]capacity.SKU, error) {
	return list(ctx, s, access.Platform(p, iam.SKURead), capacity.ListSKUs, page)
}

// SKU reads one of them.
func (s *Service) SKU(ctx context.Context, p iam.Principal, slug string) (capacity.SKU, error) {
	return read(ctx, s, access.Platform(p, iam.SKURead), func(tx db.Tx, _ access.Nothing) (capacity.SKU, error) {
		return capacity.GetSKU(ctx, tx, slug)
	})
}

// SuggestSKUs derives SKUs from what the connected nodes report.
func (s *Service) SuggestSKUs(ctx context.Context, p iam.Principal, now time.Time) ([]capacity.SKU, error) {
	return read(ctx, s, access.Platform(p, iam.SKUWrite), func(tx db.Tx, _ access.Nothing) ([]capacity.SKU, error) {
		nodes, err := fleet.ForPlacement(ctx, tx, now)
		if err != nil {
			return nil, err
		}
		sizes := make([]capacity.Node, len(nodes))
		for i, n := range nodes {
			sizes[i] = capacity.Node{ID: n.ID, CPUCores: n.CPUCores, MemoryBytes: n.MemoryBytes}
		}
		return capacity.SuggestSKUs(ctx, tx, sizes)
	})
}
