package command

import (
	"context"
	"slices"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
)

// PutSSHKeys replaces the set of an allocation's SSH keys that in.ManagedBy names; the other set stays as it is.
func (s *Service) PutSSHKeys(ctx context.Context, m Meta, projectID, allocationID string, in capacity.SSHKeySet,
) (capacity.SSHKeySet, error) {
	permission := iam.SSHKeyManage
	if in.ManagedBy == capacity.SSHKeysOfApp {
		permission = iam.AppSSHKeyManage
	}
	check := access.Project(m.Principal, permission, projectID)
	return run(ctx, s, check, func(tx db.Tx, project iam.Project) (capacity.SSHKeySet, error) {
		a, err := capacity.Get(ctx, tx, project.ID, allocationID)
		if err != nil {
			return capacity.SSHKeySet{}, err
		}
		node, err := fleet.Get(ctx, tx, a.NodeID)
		if err != nil {
			return capacity.SSHKeySet{}, err
		}
		if len(in.Keys) > 0 && !slices.Contains(node.Features, manifest.FeatureSSHKeys) {
			return capacity.SSHKeySet{}, fault.New(fault.Conflict, codeSSHKeysUnsupported,
				"The node cannot serve SSH keys: its agent is older.", nil)
		}
		org, err := iam.GetOrg(ctx, tx, project.OrgID)
		if err != nil {
			return capacity.SSHKeySet{}, err
		}
		in.OrgSlug = org.Slug
		before, after, err := capacity.PutSSHKeys(ctx, tx, a, in, m.Now)
		if err != nil {
			return capacity.SSHKeySet{}, err
		}
		return after, change.CompleteSSHKeys(ctx, tx, m.by(), permission, a, before, after)
	})
}
