package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// UndrainNode lets new things be placed on a node again. A node that was not draining stays as it is.
func (s *Service) UndrainNode(ctx context.Context, m Meta, nodeID string) error {
	if err := iam.Authorize(m.Principal, iam.NodeWrite, "", ""); err != nil {
		return err
	}
	_, err := db.RunTx(ctx, s.DB, func(tx db.Tx) (string, error) { return s.undrainNode(ctx, tx, m, nodeID) })
	return err
}

func (s *Service) undrainNode(ctx context.Context, tx db.Tx, m Meta, nodeID string) (string, error) {
	return Idempotent(ctx, tx, m, func() (string, error) {
		node, undrained, err := fleet.Undrain(ctx, tx, nodeID, m.Now)
		if err != nil {
			return "", err
		}
		if err := outOfUse(node); err != nil {
			return "", err
		}
		if !undrained {
			return nodeID, nil
		}
		return nodeID, m.recordNode(ctx, tx, nodeChange{event: "fleet.node.undrained", action: iam.NodeWrite, node: node})
	})
}
