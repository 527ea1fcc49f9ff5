package command

import (
	"context"
	"fmt"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// RemoveNodeInput is the request.
type RemoveNodeInput struct {
	Lost   bool
	Reason string
}

// RemoveNode takes a node out of the mesh for good: one that is drained and empty, or one that is lost with whatever
// it ran. Removing a removed node changes nothing; its first outcome stays.
func (s *Service) RemoveNode(ctx context.Context, m Meta, nodeID string, in RemoveNodeInput) error {
	eventType, empty := "fleet.node.removed", checkEmpty
	if in.Lost {
		eventType, empty = "fleet.node.lost", m.markNodeLost
	}
	return s.changeNode(ctx, m, nodeID, func(tx db.Tx) (fleet.Node, bool, error) {
		before, err := fleet.Get(ctx, tx, nodeID)
		if err != nil || before.IsRemoved() {
			return before, false, err
		}
		if err := fleet.CheckRemoval(before, in.Lost, m.Now); err != nil {
			return before, false, err
		}
		if err := empty(ctx, tx, nodeID); err != nil {
			return before, false, err
		}
		if err := capacity.ForgetEnvironments(ctx, tx, nodeID); err != nil {
			return before, false, err
		}
		// A state that was compiled before must not be saved after it; a lost node that comes back is to hold nothing.
		if err := fleet.BumpIntent(ctx, tx, nodeID); err != nil {
			return before, false, err
		}
		return fleet.Remove(ctx, tx, nodeID, in.Lost, in.Reason, m.Now)
	}, eventType, in.Reason)
}

// checkEmpty refuses while the node still has something to serve, or to hand over.
func checkEmpty(ctx context.Context, tx db.Tx, nodeID string) error {
	held, err := capacity.HeldOn(ctx, tx, nodeID)
	if err != nil {
		return err
	}
	if held > 0 {
		return fault.New(fault.Conflict, codeNodeInUse, fmt.Sprintf("%d allocations are held on the node; they must be "+
			"released first.", held), nil)
	}
	volumes, err := capacity.VolumesOn(ctx, tx, nodeID)
	if err != nil {
		return err
	}
	if volumes > 0 {
		return fault.New(fault.Conflict, codeNodeInUse, fmt.Sprintf("The node keeps %d volumes of projects; they must be "+
			"deleted first, or the node declared lost with them.", volumes), nil)
	}
	owing, err := ledger.Owing(ctx, tx, nodeID)
	if err != nil {
		return err
	}
	if owing > 0 {
		return fault.New(fault.Conflict, codeNodeOwesUsage, "The node has not handed over all usage of what ran there; "+
			"wait for it, or declare the node lost.", nil)
	}
	return nil
}

// markNodeLost ends everything on a node that is gone for good: capacity, members, bills.
func (m Meta) markNodeLost(ctx context.Context, tx db.Tx, nodeID string) error {
	lost, err := capacity.MarkLost(ctx, tx, nodeID, m.Now)
	if err != nil {
		return err
	}
	for _, l := range lost {
		if err := ledger.CloseSubject(ctx, tx, l.Allocation.ID, m.Now, m.Now); err != nil {
			return err
		}
		if err := change.RecordAllocation(ctx, tx, m.by(), iam.NodeWrite, l.Before, l.Allocation); err != nil {
			return err
		}
	}
	volumes, err := capacity.LoseVolumes(ctx, tx, nodeID, m.Now)
	if err != nil {
		return err
	}
	for _, c := range volumes {
		if err := change.CompleteVolume(ctx, tx, m.by(), iam.NodeWrite, c); err != nil {
			return err
		}
	}
	changes, err := instance.MarkLost(ctx, tx, nodeID, m.Now)
	if err != nil {
		return err
	}
	for _, c := range changes {
		if err := change.CompleteInstance(ctx, tx, m.by(), iam.NodeWrite, c); err != nil {
			return err
		}
	}
	return nil
}
