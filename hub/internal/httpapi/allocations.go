package httpapi

import (
	"context"
	"strconv"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/query"
	"github.com/gpuaas/gpuaas/hub/plan"
)

// ListAllocations lists a project's allocations, the newest first.
func (s *Server) ListAllocations(ctx context.Context,
	r ListAllocationsRequestObject,
) (ListAllocationsResponseObject, error) {
	items, next, err := pageByID(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]capacity.Allocation, error) {
		return s.Queries.Allocations(ctx, principalOf(ctx), capacity.Filter{
			ProjectID: r.ProjectID, Status: capacity.Status(r.Params.Status), After: p.After, Limit: p.Limit,
		})
	}, func(v capacity.Allocation) string { return v.ID })
	return ListAllocations200JSONResponse{Items: views(items, allocationView), NextCursor: next}, err
}

// GetAllocation gives one allocation, on request once it has changed.
func (s *Server) GetAllocation(ctx context.Context, r GetAllocationRequestObject) (GetAllocationResponseObject, error) {
	a, err := s.Queries.Allocation(ctx, principalOf(ctx), r.ProjectID, r.AllocationID,
		watchOf(r.Params.After, r.Params.Wait))
	return GetAllocation200JSONResponse(allocationView(a)), err
}

// CreateAllocation holds capacity.
func (s *Server) CreateAllocation(ctx context.Context,
	r CreateAllocationRequestObject,
) (CreateAllocationResponseObject, error) {
	a, err := s.Commands.CreateAllocation(ctx, metaFrom(ctx), capacity.NewAllocation{
		ProjectID: r.ProjectID, NodeID: r.Body.NodeID, SKU: r.Body.Sku, Shape: capacity.Shape(r.Body.CapacityShape),
		AcceleratorCount: int(r.Body.AcceleratorCount), AcceleratorModel: r.Body.AcceleratorModel,
		CPUCores: int64(r.Body.CPUCores), MemoryMiB: r.Body.MemoryMib,
	})
	return CreateAllocation201JSONResponse(allocationView(a)), err
}

// ReleaseAllocation gives capacity back.
func (s *Server) ReleaseAllocation(ctx context.Context,
	r ReleaseAllocationRequestObject,
) (ReleaseAllocationResponseObject, error) {
	a, err := s.Commands.ReleaseAllocation(ctx, metaFrom(ctx), r.ProjectID, r.AllocationID)
	return ReleaseAllocation202JSONResponse(allocationView(a)), err
}

func allocationView(a capacity.Allocation) Allocation {
	return Allocation{
		ID: a.ID, ResourceVersion: a.ResourceVersion, OrgID: a.OrgID, ProjectID: a.ProjectID, NodeID: a.NodeID, Sku: a.SKU,
		CapacityShape:    CapacityShape(a.Shape),
		AcceleratorCount: int32(a.AcceleratorCount), AcceleratorModel: a.AcceleratorModel, AcceleratorIds: append([]string{},
			a.AcceleratorIDs...),
		CPUCores: int32(a.CPUCores), MemoryMib: a.MemoryMiB,
		FreeCPUCores: strconv.FormatFloat(float64(a.FreeCPUMillis)/1000, 'f', -1, 64), FreeMemoryMib: a.FreeMemoryBytes >> 20,
		Status: AllocationStatus(a.Status), CorrelationID: a.CorrelationID, CreatedAt: a.CreatedAt, UpdatedAt: a.UpdatedAt,
		ReleasedAt: a.ReleasedAt,
	}
}

// ListTargets says where an instance of a version fits.
func (s *Server) ListTargets(ctx context.Context, r ListTargetsRequestObject) (ListTargetsResponseObject, error) {
	chosen := InstanceResources{
		AcceleratorModel:   r.Params.AcceleratorModel,
		AcceleratorSharing: r.Params.AcceleratorSharing,
		CPUMillis:          r.Params.CPUMillis,
		MemoryMib:          r.Params.MemoryMib,
	}
	if r.Params.Accelerators > 0 {
		chosen.Accelerators = &r.Params.Accelerators
	}
	targets, err := s.Queries.Targets(ctx, principalOf(ctx), query.TargetsInput{
		ProjectID: r.ProjectID,
		AppSlug:   r.AppSlug,
		Version:   r.Version,
		Resources: resourceChoice(chosen, nil, nil, EnvironmentChoice{Requirements: r.Params.Requirement}),
		VolumeIDs: r.Params.VolumeID,
		Now:       metaFrom(ctx).Now,
	})
	return ListTargets200JSONResponse{Items: views(targets, targetView)}, err
}

func targetView(t query.Target) Target {
	out := Target{
		Kind:          TargetKind(t.Kind),
		ID:            t.ID,
		NodeID:        t.NodeID,
		Fits:          t.Misfit == plan.Fits,
		Reason:        TargetReason(t.Misfit),
		FreeCPUMillis: t.CPUMillis,
		FreeMemoryMib: t.MemoryBytes >> 20,
	}
	for _, a := range t.Accelerators {
		if a.Healthy {
			out.FreeAccelerators++
		}
	}
	return out
}
