package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// ReleaseNode ends the quarantine of a node, once an admin has seen to it that one machine has its key. The store that
// dials next takes a new incarnation and goes on; should there be two again, they are noticed again.
type ReleaseNode struct {
	DB *db.DB
	// Kick ends the node's connection, with a reason; called after the commit.
	Kick func(nodeID, reason string)
}

// reasonReleased is what the node is told; it dials again.
const reasonReleased = "quarantine_released"

// Do releases the node. Releasing one that is not quarantined changes nothing.
func (c *ReleaseNode) Do(ctx context.Context, m Meta, nodeID string) error {
	if err := iam.Authorize(m.Principal, iam.NodeWrite, "", ""); err != nil {
		return err
	}
	released, err := db.RunTx(ctx, c.DB, func(tx db.Tx) (bool, error) { return c.do(ctx, tx, m, nodeID) })
	if err == nil && released {
		c.Kick(nodeID, reasonReleased)
	}
	return err
}

func (c *ReleaseNode) do(ctx context.Context, tx db.Tx, m Meta, nodeID string) (bool, error) {
	return Idempotent(ctx, tx, m, func() (bool, error) {
		node, released, err := fleet.Release(ctx, tx, nodeID, m.Now)
		if err != nil || !released {
			return false, err
		}
		return true, m.recordNode(ctx, tx, nodeChange{event: "fleet.node.released", action: iam.NodeWrite, node: node})
	})
}
