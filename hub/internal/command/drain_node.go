package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// DrainNode stops new placements on a node; what runs there goes on. Draining a draining node changes nothing.
func (s *Service) DrainNode(ctx context.Context, m Meta, nodeID string) error {
	if err := iam.Authorize(m.Principal, iam.NodeWrite, "", ""); err != nil {
		return err
	}
	_, err := db.RunTx(ctx, s.DB, func(tx db.Tx) (string, error) { return s.drainNode(ctx, tx, m, nodeID) })
	return err
}

// outOfUse refuses to change what a node takes once it takes nothing for good.
func outOfUse(n fleet.Node) error {
	switch {
	case n.IsBanned():
		return fault.New(fault.Conflict, fleet.CodeBanned, "The node is banned for good; nothing is placed on it.", nil)
	case n.IsRemoved():
		return fault.New(fault.Conflict, fleet.CodeNodeRemoved, "The node was removed for good; nothing is placed on it.",
			nil)
	}
	return nil
}

func (s *Service) drainNode(ctx context.Context, tx db.Tx, m Meta, nodeID string) (string, error) {
	return Idempotent(ctx, tx, m, func() (string, error) {
		node, drained, err := fleet.Drain(ctx, tx, nodeID, m.Now)
		if err != nil {
			return "", err
		}
		if err := outOfUse(node); err != nil {
			return "", err
		}
		if !drained {
			return nodeID, nil
		}
		return nodeID, m.recordNode(ctx, tx, nodeChange{event: "fleet.node.draining", action: iam.NodeWrite, node: node})
	})
}
