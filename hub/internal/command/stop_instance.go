package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
)

// StopInstance ends the containers of an app instance. Its place stays: allocation, ports and what is billed for them;
// usage ends with the containers, and its lease is not renewed.
type StopInstance struct {
	DB *db.DB
	// Poke wakes the dispatcher of a node.
	Poke func(nodeID string)
	// Turns are of the commands on instances.
	Turns *Turns
}

// Do answers with the instance in status stopping.
func (c *StopInstance) Do(ctx context.Context, m Meta, projectID, instanceID string) (instance.Instance, error) {
	out, err := inTurn(ctx, c.Turns, c.DB, projectID, func(tx db.Tx) (instanceResult, error) {
		return c.do(ctx, tx, m, projectID, instanceID)
	})
	if err != nil {
		return instance.Instance{}, err
	}
	return out.poke(c.Poke), nil
}

func (c *StopInstance) do(ctx context.Context, tx db.Tx, m Meta, projectID, instanceID string) (instanceResult, error) {
	return m.act(ctx, tx, iam.InstanceStop, projectID, instanceID, func(_ iam.Project, i instance.Instance,
		ask instance.Ask,
	) (instance.Change, error) {
		return instance.AskStop(ctx, tx, i, ask, m.Now)
	})
}
