package command

import (
	"context"
	"fmt"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
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
	if err := iam.Authorize(m.Principal, iam.NodeWrite, "", ""); err != nil {
		return err
	}
	touched, err := db.RunTx(ctx, s.DB, func(tx db.Tx) ([]string, error) { return s.removeNode(ctx, tx, m, nodeID, in) })
	if err != nil {
		return err
	}
	if !in.Lost {
		s.ShutOut(nodeID, "node_removed")
	}
	for _, id := range touched {
		s.EnqueueNode(id)
	}
	return nil
}

// do answers with the nodes that are to hold something else now.
func (s *Service) removeNode(ctx context.Context, tx db.Tx, m Meta, nodeID string,
	in RemoveNodeInput,
) ([]string, error) {
	return Idempotent(ctx, tx, m, func() ([]string, error) {
		before, err := fleet.Get(ctx, tx, nodeID)
		if err != nil || before.IsRemoved() {
			return nil, err
		}
		if err := fleet.CheckRemoval(before, in.Lost, m.Now); err != nil {
			return nil, err
		}
		var touched []string
		typ := "fleet.node.removed"
		if in.Lost {
			typ = "fleet.node.lost"
			touched, err = m.loseNode(ctx, tx, nodeID)
		} else {
			err = checkEmpty(ctx, tx, nodeID)
		}
		if err != nil {
			return nil, err
		}
		node, _, err := fleet.Remove(ctx, tx, nodeID, in.Lost, in.Reason, m.Now)
		if err != nil {
			return nil, err
		}
		// A state that was compiled before must not be saved after it; a lost node that comes back is told to hold nothing.
		if err := fleet.BumpIntent(ctx, tx, nodeID); err != nil {
			return nil, err
		}
		return touched, m.recordNode(ctx, tx, nodeChange{event: typ, action: iam.NodeWrite, node: node, reason: in.Reason})
	})
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

// loseNode ends everything on a node that is gone for good: capacity, members, bills. It returns the nodes that other
// members of the instances are on.
func (m Meta) loseNode(ctx context.Context, tx db.Tx, nodeID string) ([]string, error) {
	losses, err := capacity.Lose(ctx, tx, nodeID, m.Now)
	if err != nil {
		return nil, err
	}
	for _, l := range losses {
		if err := ledger.CloseSubject(ctx, tx, l.Allocation.ID, m.Now, m.Now); err != nil {
			return nil, err
		}
		if err := m.RecordAllocation(ctx, tx, iam.NodeWrite, l.Before, l.Allocation); err != nil {
			return nil, err
		}
	}
	changes, err := instance.MarkLost(ctx, tx, nodeID, m.Now)
	if err != nil {
		return nil, err
	}
	var touched []string
	for _, c := range changes {
		nodes, err := m.followChange(ctx, tx, iam.NodeWrite, c)
		if err != nil {
			return nil, err
		}
		touched = append(touched, nodes...)
	}
	return touched, nil
}
