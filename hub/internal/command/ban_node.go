package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// BanNode shuts out a compromised node for good. Banning a banned node changes nothing; its first reason stays.
func (s *Service) BanNode(ctx context.Context, m Meta, nodeID, reason string) error {
	if err := iam.Authorize(m.Principal, iam.NodeWrite, "", ""); err != nil {
		return err
	}
	if _, err := db.RunTx(ctx, s.DB, func(tx db.Tx) (string, error) {
		return s.banNode(ctx, tx, m, nodeID, reason)
	}); err != nil {
		return err
	}
	s.ShutOut(nodeID, string(fleet.CodeBanned))
	return nil
}

func (s *Service) banNode(ctx context.Context, tx db.Tx, m Meta, nodeID, reason string) (string, error) {
	return Idempotent(ctx, tx, m, func() (string, error) {
		node, banned, err := fleet.Ban(ctx, tx, nodeID, reason, m.Now)
		if err != nil || !banned {
			return nodeID, err
		}
		// Counted although nobody will collect it: a state that was compiled before the ban must not be saved after it.
		if err := fleet.BumpIntent(ctx, tx, nodeID); err != nil {
			return "", err
		}
		return nodeID, m.recordNode(ctx, tx, nodeChange{
			event: "fleet.node.banned", action: iam.NodeWrite, node: node,
			reason: reason,
		})
	})
}
