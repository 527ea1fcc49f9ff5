package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
)

// DecommissionInstance begins the end of an app instance; the node's proof completes it.
type DecommissionInstance struct {
	DB *db.DB
	// Poke wakes the dispatcher of a node.
	Poke func(nodeID string)
	// Turns are of the commands on instances.
	Turns *Turns
}

// Do answers with the instance in status decommissioning.
func (c *DecommissionInstance) Do(ctx context.Context, m Meta, projectID,
	instanceID string,
) (instance.Instance, error) {
	out, err := inTurn(ctx, c.Turns, c.DB, projectID, func(tx db.Tx) (instanceResult, error) {
		return c.do(ctx, tx, m, projectID, instanceID)
	})
	if err != nil {
		return instance.Instance{}, err
	}
	return out.poke(c.Poke), nil
}

func (c *DecommissionInstance) do(ctx context.Context, tx db.Tx, m Meta, projectID,
	instanceID string,
) (instanceResult, error) {
	return m.act(ctx, tx, iam.InstanceDelete, projectID, instanceID, func(_ iam.Project, i instance.Instance,
		ask instance.Ask,
	) (instance.Change, error) {
		return instance.AskDecommission(ctx, tx, i, ask, m.Now)
	})
}
