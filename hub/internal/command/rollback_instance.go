package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
)

// RollbackInstance brings an app instance back to a version that it has been running.
type RollbackInstance struct {
	DB *db.DB
	// Revoked says whether the trust bundle has revoked a key.
	Revoked func(keyID string) bool
	// MinVersion gives the lowest version of an app that the trust bundle lets start; empty for any. It may be nil.
	MinVersion func(appSlug string) string
	// Poke wakes the dispatcher of a node.
	Poke func(nodeID string)
	// Turns are of the commands on instances.
	Turns *Turns
}

// Do answers with the instance in status rolling_back. Without a version it goes back to the previous one.
func (c *RollbackInstance) Do(ctx context.Context, m Meta, projectID, instanceID,
	version string,
) (instance.Instance, error) {
	out, err := inTurn(ctx, c.Turns, c.DB, projectID, func(tx db.Tx) (instanceResult, error) {
		return c.do(ctx, tx, m, projectID, instanceID, version)
	})
	if err != nil {
		return instance.Instance{}, targetVersion(err)
	}
	return out.poke(c.Poke), nil
}

func (c *RollbackInstance) do(ctx context.Context, tx db.Tx, m Meta, projectID, instanceID,
	version string,
) (instanceResult, error) {
	return m.act(ctx, tx, iam.InstanceRollback, projectID, instanceID, func(_ iam.Project, i instance.Instance,
		ask instance.Ask,
	) (instance.Change, error) {
		target, err := instance.RollbackTarget(ctx, tx, i, version)
		if err != nil {
			return instance.Change{}, err
		}
		delegation, err := again(ctx, tx, m, i, target.No, target.AppVersion, c.Revoked, c.MinVersion)
		if err != nil {
			return instance.Change{}, err
		}
		return instance.AskRollback(ctx, tx, i, ask, target, delegation, m.Now)
	})
}

// again checks that the content of a revision may start once more, and gives the delegation to do so under.
func again(
	ctx context.Context, tx db.Tx, m Meta, i instance.Instance, revision int64, version string, revoked func(string) bool,
	minVersion func(string) string,
) ([]byte, error) {
	delegation, err := catalog.Again(ctx, tx, catalog.Want{
		AppSlug: i.AppSlug, Version: version, OrgID: i.OrgID, ProjectID: i.ProjectID, Now: m.Now, Revoked: revoked,
		MinVersion: minVersion,
	})
	if err != nil {
		return nil, err
	}
	for _, member := range i.Members {
		services, err := instance.Services(ctx, tx, member.ID, revision)
		if err != nil {
			return nil, err
		}
		for _, s := range services {
			if err := artifact.CheckRunnable(ctx, tx, version, s.GetImage()); err != nil {
				return nil, err
			}
		}
	}
	return delegation, nil
}
