package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// WithAround has fn run each transaction's body.
func (s *Service) WithAround(fn func(tx db.Tx, body func(db.Tx) error) error) *Service {
	s.around = fn
	return s
}

// WithMinVersion replaces the bundle's lowest versions.
func (s *Service) WithMinVersion(fn func(appSlug string) string) *Service {
	s.minVersionOf = fn
	return s
}

// CreateAllocationOn creates an allocation on one of the nodes in the caller's transaction.
func (s *Service) CreateAllocationOn(ctx context.Context, tx db.Tx, m Meta, in capacity.NewAllocation,
	nodeIDs []string,
) (capacity.Allocation, error) {
	project, err := access.Project(m.Principal, iam.AllocationCreate, in.ProjectID)(ctx, tx)
	if err != nil {
		return capacity.Allocation{}, err
	}
	return s.createAllocation(ctx, tx, m, project, in, nodeIDs)
}

// PublisherOrg reserves an app slug as a publish intent does.
func PublisherOrg(ctx context.Context, tx db.Tx, m Meta, project iam.Project,
	appSlug string,
) (reserved bool, err error) {
	_, reserved, err = publisherOrg(ctx, tx, m, project, appSlug)
	return reserved, err
}
