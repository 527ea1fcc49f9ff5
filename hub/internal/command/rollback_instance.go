package command

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
)

// RollbackInstance returns an app instance to a version that it has run, by default the previous one, and answers
// with it in status rolling_back.
func (s *Service) RollbackInstance(ctx context.Context, m Meta, projectID, instanceID,
	version string,
) (instance.Instance, error) {
	i, err := s.act(ctx, m, iam.InstanceRollback, projectID, instanceID, func(ctx context.Context, tx db.Tx,
		i instance.Instance, r instance.Request, now time.Time,
	) (instance.Change, error) {
		target, err := instance.RollbackTarget(ctx, tx, i, version)
		if err != nil {
			return instance.Change{}, err
		}
		delegation, err := s.checkRestartable(ctx, tx, m, i, target.No, target.AppVersion)
		if err != nil {
			return instance.Change{}, err
		}
		services, asks, why, err := regain(ctx, tx, i, target)
		if err != nil {
			return instance.Change{}, err
		}
		if err := checkVolumesReady(ctx, tx, i); err != nil {
			return instance.Change{}, err
		}
		c, err := instance.RequestRollback(ctx, tx, i, r, target, services, why == "", delegation, now)
		if asks {
			c.Strategy, c.StrategyReason = strategyOf(why), why
		}
		return c, err
	})
	return i, targetVersion(err)
}

// checkRestartable checks that the content of a revision may start once more, and returns the delegation for it.
func (s *Service) checkRestartable(ctx context.Context, tx db.Tx, m Meta, i instance.Instance, revision int64,
	version string,
) ([]byte, error) {
	delegation, err := catalog.CheckRestartable(ctx, tx, catalog.Want{
		AppSlug: i.AppSlug, Version: version, OrgID: i.OrgID, ProjectID: i.ProjectID, Now: m.Now, Revoked: s.revoked,
		MinVersion: s.minVersion,
	})
	if err != nil || i.External() {
		return delegation, err
	}
	for _, member := range i.Members {
		if member.Gone {
			continue
		}
		services, err := instance.Services(ctx, tx, member.ID, revision)
		if err != nil {
			return nil, err
		}
		if err := artifact.CheckRunnable(ctx, tx, version, services); err != nil {
			return nil, err
		}
	}
	return delegation, nil
}
