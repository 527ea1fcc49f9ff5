package command

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
)

// StartInstance runs a stopped or failed app instance again, where it was, and answers with it in status deploying. A
// member whose lease has run out needs a new one: without money there is no start.
func (s *Service) StartInstance(ctx context.Context, m Meta, projectID, instanceID string) (instance.Instance, error) {
	return s.act(ctx, m, iam.InstanceStart, projectID, instanceID, func(ctx context.Context, tx db.Tx,
		i instance.Instance, r instance.Request, now time.Time,
	) (instance.Change, error) {
		if _, _, err := lifecycle.Start(i.Lifecycle, i.History()); err != nil {
			return instance.Change{}, err
		}
		if err := checkVolumesReady(ctx, tx, i); err != nil {
			return instance.Change{}, err
		}
		delegation, err := s.checkRestartable(ctx, tx, m, i, i.Revision, i.Version)
		if err != nil {
			return instance.Change{}, err
		}
		if err := s.coverMembers(ctx, tx, m, i); err != nil {
			return instance.Change{}, err
		}
		return instance.RequestStart(ctx, tx, i, r, delegation, now)
	})
}

// coverMembers issues a lease to each member whose last one ended while the instance was stopped.
func (s *Service) coverMembers(ctx context.Context, tx db.Tx, m Meta, i instance.Instance) error {
	for _, member := range i.Members {
		if member.External || member.Gone {
			continue
		}
		covered, err := ledger.LeasedUntil(ctx, tx, member.ID)
		if err != nil {
			return err
		}
		if covered.After(m.Now.Add(billing.MinLease)) {
			continue
		}
		if _, err := ledger.IssueLease(ctx, tx, ledger.LeaseRequest{
			SubjectID: member.ID,
			NodeID:    member.NodeID,
			Now:       m.Now,
			Duration:  s.LeaseDuration,
			AppSlug:   i.AppSlug,
		}); err != nil {
			return err
		}
	}
	return nil
}
