package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
)

// StopInstance ends the containers of an app instance and answers with it in status stopping. Its allocation and ports
// stay, and are billed; usage ends with the containers, and the lease is not renewed.
func (s *Service) StopInstance(ctx context.Context, m Meta, projectID, instanceID string) (instance.Instance, error) {
	return s.act(ctx, m, projectID, instanceID, stopAction(m))
}

func stopAction(m Meta) instanceAction {
	return instanceAction{iam.InstanceStop, func(ctx context.Context, tx db.Tx, i instance.Instance,
		ask instance.Request,
	) (instance.Change, error) {
		return instance.RequestStop(ctx, tx, i, ask, m.Now)
	}}
}

// DecommissionInstance begins the end of an app instance and answers with it in status decommissioning; the node's
// proof of removal completes it.
func (s *Service) DecommissionInstance(ctx context.Context, m Meta, projectID,
	instanceID string,
) (instance.Instance, error) {
	return s.act(ctx, m, projectID, instanceID, decommissionAction(m))
}

func decommissionAction(m Meta) instanceAction {
	return instanceAction{iam.InstanceDelete, func(ctx context.Context, tx db.Tx, i instance.Instance,
		ask instance.Request,
	) (instance.Change, error) {
		return instance.RequestDecommission(ctx, tx, i, ask, m.Now)
	}}
}
