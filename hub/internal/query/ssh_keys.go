package query

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// SSHKeys reads one of the sets of an allocation's SSH keys.
func (s *Service) SSHKeys(ctx context.Context, p iam.Principal, projectID, allocationID, managedBy string,
) (capacity.SSHKeySet, error) {
	return read(ctx, s, access.Project(p, iam.AllocationRead, projectID),
		func(tx db.Tx, project iam.Project) (capacity.SSHKeySet, error) {
			a, err := capacity.Get(ctx, tx, project.ID, allocationID)
			if err != nil {
				return capacity.SSHKeySet{}, err
			}
			return capacity.GetSSHKeys(ctx, tx, a, managedBy)
		})
}
