package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// reasonReleased is what the node is told; it dials again.
const reasonReleased = "quarantine_released"

// ReleaseNode ends the quarantine of a node, once an admin has seen to it that one machine has its key. The store that
// dials next takes a new incarnation and goes on; should there be two again, they are noticed again. Releasing one
// that is not quarantined changes nothing.
func (s *Service) ReleaseNode(ctx context.Context, m Meta, nodeID string) error {
	if err := iam.Authorize(m.Principal, iam.NodeWrite, "", ""); err != nil {
		return err
	}
	released, err := db.RunTx(ctx, s.DB, func(tx db.Tx) (bool, error) { return s.releaseNode(ctx, tx, m, nodeID) })
	if err == nil && released {
		s.Disconnect(nodeID, reasonReleased)
	}
	return err
}

func (s *Service) releaseNode(ctx context.Context, tx db.Tx, m Meta, nodeID string) (bool, error) {
	return Idempotent(ctx, tx, m, func() (bool, error) {
		node, released, err := fleet.Release(ctx, tx, nodeID, m.Now)
		if err != nil || !released {
			return false, err
		}
		return true, m.recordNode(ctx, tx, nodeChange{event: "fleet.node.released", action: iam.NodeWrite, node: node})
	})
}
