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
}

// Do answers with the instance in status decommissioning.
func (c *DecommissionInstance) Do(ctx context.Context, m Meta, projectID, instanceID string) (instance.Instance, error) {
	out, err := db.RunTx(ctx, c.DB, func(tx db.Tx) (instanceResult, error) { return c.do(ctx, tx, m, projectID, instanceID) })
	if err != nil {
		return instance.Instance{}, err
	}
	return out.poke(c.Poke), nil
}

func (c *DecommissionInstance) do(ctx context.Context, tx db.Tx, m Meta, projectID, instanceID string) (instanceResult, error) {
	project, err := iam.InProject(ctx, tx, m.Principal, iam.InstanceDelete, projectID)
	if err != nil {
		return instanceResult{}, err
	}
	return Idempotent(ctx, tx, m, func() (instanceResult, error) {
		i, err := instance.Get(ctx, tx, project.ID, instanceID)
		if err != nil {
			return instanceResult{}, err
		}
		ask := instance.Ask{OperationID: db.NewID(), By: instance.Actor{Type: m.Principal.Type, ID: m.Principal.ID}, CorrelationID: m.CorrelationID}
		change, err := instance.AskDecommission(ctx, tx, i, ask, m.Now)
		if err != nil {
			return instanceResult{}, err
		}
		nodes, err := touchNodes(ctx, tx, change)
		if err != nil {
			return instanceResult{}, err
		}
		return instanceResult{change.Instance, nodes}, m.recordInstance(ctx, tx, iam.InstanceDelete, change)
	})
}
