package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// fieldOf is the field of an action's request that decides what the members hold; empty for an action without one.
func fieldOf(action iam.Permission) string {
	if action == iam.InstanceUpgrade || action == iam.InstanceRollback {
		return "/version"
	}
	return ""
}

// checkMembers compiles, before the change is committed, what the nodes are to hold of an instance that is to run after
// it. A member that breaks a rule would be accepted here and left out of its node's state later.
func checkMembers(ctx context.Context, tx db.Tx, c instance.Change, field string) error {
	if held, stopped := c.Instance.Lifecycle.Status.Desired(); !c.DesiredChanged || !held || stopped {
		return nil
	}
	members, err := instance.SnapshotOf(ctx, tx, c.Instance.ID)
	if err != nil {
		return err
	}
	if err := secret.Fill(ctx, tx, members); err != nil {
		return err
	}
	for _, m := range members {
		err := plan.CheckMember(m)
		if err == nil {
			continue
		}
		f := fault.New(fault.Unprocessable, codeMemberLimitExceeded,
			"What a node would have to hold of the app instance exceeds a limit; use a smaller config, smaller parameters or a "+
				"smaller version.",
			err).Permanent()
		if field != "" {
			f = f.WithField(field, "makes a member that exceeds a limit of its node")
		}
		return f
	}
	return nil
}
