package query

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
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
