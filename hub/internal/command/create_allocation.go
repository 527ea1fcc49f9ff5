package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/recovery"
)

// CreateAllocation holds capacity on a node for a project.
type CreateAllocation struct {
	DB *db.DB
}

// CreateAllocationInput is the request; NodeID, SKU and AcceleratorModel may be empty.
type CreateAllocationInput struct {
	ProjectID        string
	NodeID           string
	SKU              string
	Shape            capacity.Shape
	AcceleratorCount int
	AcceleratorModel string
	CPUCores         int64
	MemoryMiB        int64
}

// Do answers with the active allocation.
func (c *CreateAllocation) Do(ctx context.Context, m Meta, in CreateAllocationInput) (capacity.Allocation, error) {
	return db.RunTx(ctx, c.DB, func(tx db.Tx) (capacity.Allocation, error) { return c.do(ctx, tx, m, in) })
}

func (c *CreateAllocation) do(ctx context.Context, tx db.Tx, m Meta, in CreateAllocationInput) (capacity.Allocation, error) {
	project, err := iam.InProject(ctx, tx, m.Principal, iam.AllocationCreate, in.ProjectID)
	if err != nil {
		return capacity.Allocation{}, err
	}
	return Idempotent(ctx, tx, m, func() (capacity.Allocation, error) {
		nodes, err := candidates(ctx, tx, m, in.NodeID)
		if err != nil {
			return capacity.Allocation{}, err
		}
		a, err := capacity.Create(ctx, tx, capacity.NewAllocation{
			ID: db.NewID(), OrgID: project.OrgID, ProjectID: project.ID, NodeID: in.NodeID, SKU: in.SKU, Shape: in.Shape,
			AcceleratorCount: in.AcceleratorCount, AcceleratorModel: in.AcceleratorModel, CPUCores: in.CPUCores, MemoryMiB: in.MemoryMiB,
			RequestedBy: capacity.Actor{Type: m.Principal.Type, ID: m.Principal.ID}, CorrelationID: m.CorrelationID,
		}, nodes, m.Now)
		if err != nil {
			return capacity.Allocation{}, err
		}
		if err := ledger.OpenSubject(ctx, tx, ledger.Subject{
			ID: a.ID, Kind: ledger.Allocation, OrgID: a.OrgID, ProjectID: a.ProjectID, AllocationID: a.ID, NodeID: a.NodeID, SKU: a.SKU,
			CorrelationID: m.CorrelationID, OpenedAt: m.Now,
		}); err != nil {
			return capacity.Allocation{}, err
		}
		return a, m.recordAllocation(ctx, tx, iam.AllocationCreate, "", a)
	})
}

// candidates are the nodes that may get something new, and the named one even if it may not: it exists, and has no room.
func candidates(ctx context.Context, tx db.Tx, m Meta, named string) ([]capacity.Node, error) {
	open, err := fleet.ForPlacement(ctx, tx, m.Now)
	if err != nil {
		return nil, err
	}
	var out []capacity.Node
	found := named == ""
	for _, n := range open {
		waits, err := recovery.Waits(ctx, tx, n.ID)
		if err != nil {
			return nil, err
		}
		out = append(out, capacityNode(n, !waits))
		found = found || n.ID == named
	}
	if !found {
		if all, err := fleet.Get(ctx, tx, named); err == nil {
			out = append(out, capacityNode(all, false))
		}
	}
	return out, nil
}

func capacityNode(n fleet.Node, usable bool) capacity.Node {
	return capacity.Node{ID: n.ID, CPUCores: int64(n.Facts.GetCpuCores()), MemoryBytes: int64(n.Facts.GetMemoryBytes()), Usable: usable}
}
