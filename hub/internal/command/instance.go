package command

import (
	"context"
	"errors"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// StopInstance ends the containers of an app instance and answers with it in status stopping. Its allocation and ports
// stay, and are billed; usage ends with the containers, and the lease is not renewed.
func (s *Service) StopInstance(ctx context.Context, m Meta, projectID, instanceID string) (instance.Instance, error) {
	return s.act(ctx, m, iam.InstanceStop, projectID, instanceID, instance.RequestStop)
}

// DecommissionInstance begins the end of an app instance and answers with it in status decommissioning; the node's
// proof of removal completes it.
func (s *Service) DecommissionInstance(ctx context.Context, m Meta, projectID,
	instanceID string,
) (instance.Instance, error) {
	return s.act(ctx, m, iam.InstanceDelete, projectID, instanceID, instance.RequestDecommission)
}

// mayOperate reports as Forbidden that the caller may not do this to an app instance that the platform manages.
func mayOperate(m Meta, permission iam.Permission, i instance.Instance) error {
	return iam.AuthorizeOperation(m.Principal, permission, i.OrgID, i.ProjectID,
		iam.OnInstance{ID: i.ID, OperatingMode: i.Modes.OperatingMode})
}

// action asks for one step in an app instance's life.
type action func(ctx context.Context, tx db.Tx, i instance.Instance, r instance.Request,
	now time.Time) (instance.Change, error)

// act runs an action on an app instance: it checks that the nodes can hold what is desired after it, and completes it.
func (s *Service) act(ctx context.Context, m Meta, permission iam.Permission, projectID, instanceID string,
	do action,
) (instance.Instance, error) {
	return inProject(ctx, s, m, permission, projectID, func(tx db.Tx, project iam.Project) (instance.Instance, error) {
		i, err := instance.Get(ctx, tx, project.ID, instanceID)
		if err != nil {
			return instance.Instance{}, err
		}
		if err := mayOperate(m, permission, i); err != nil {
			return instance.Instance{}, err
		}
		if permission == iam.InstanceDelete {
			if err := instance.CheckDetached(ctx, tx, i.ID); err != nil {
				return instance.Instance{}, err
			}
		}
		if err := checkResynced(ctx, tx, permission, i); err != nil {
			return instance.Instance{}, err
		}
		c, err := do(ctx, tx, i, instance.Request{
			OperationID:   db.NewID(),
			By:            m.Principal.Actor(),
			CorrelationID: m.CorrelationID,
		}, m.Now)
		if err != nil {
			return instance.Instance{}, err
		}
		if err := checkMembers(ctx, tx, c, fieldOf(permission)); err != nil {
			return instance.Instance{}, err
		}
		c.Before = i
		switch {
		case permission == iam.InstanceDelete:
			return change.CompleteEnd(ctx, tx, m.by(), c)
		case i.External():
			return s.actExternal(ctx, tx, m, permission, c)
		}
		return c.Instance, change.CompleteInstance(ctx, tx, m.by(), string(permission), c)
	})
}

// checkResynced refuses a change that would reuse a revision number that the hub may have assigned before its restore.
// A decommission can be requested at any time.
func checkResynced(ctx context.Context, tx db.Tx, permission iam.Permission, i instance.Instance) error {
	if permission == iam.InstanceDelete || i.External() {
		return nil
	}
	ids := make([]string, 0, len(i.Members))
	for _, m := range i.Members {
		ids = append(ids, m.NodeID)
	}
	nodes, err := fleet.GetAll(ctx, tx, ids)
	if err != nil {
		return err
	}
	for _, node := range nodes {
		if node.Resync.Status == fleet.AwaitingResync {
			return fault.New(fault.Unavailable, codeNodeRecovering, "The hub was restored from a backup and waits for the node "+
				"of this app instance; try again when it is back.", nil).RetryAfter(30 * time.Second)
		}
	}
	return nil
}

// targetVersion points the fields of a fault at what the request calls the version.
func targetVersion(err error) error {
	f, is := errors.AsType[*fault.Error](err)
	if !is {
		return err
	}
	for n := range f.Fields {
		if f.Fields[n].Pointer == "/version" {
			f.Fields[n].Pointer = "/target_version"
		}
	}
	return f
}
