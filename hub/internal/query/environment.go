package query

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// Environments lists the environments that nodes keep for a project.
func (s *Service) Environments(ctx context.Context, p iam.Principal, projectID string,
	page db.Page,
) ([]capacity.Environment, error) {
	return listIn(ctx, s, access.Project(p, iam.EnvironmentRead, projectID), capacity.Environments, projectID, page)
}

// EnvironmentToRemove reads an environment for a caller who may remove it, and whose project it is.
func (s *Service) EnvironmentToRemove(ctx context.Context, p iam.Principal, projectID, nodeID, digest string,
) (capacity.Environment, iam.Project, error) {
	var project iam.Project
	e, err := read(ctx, s, access.Project(p, iam.EnvironmentManage, projectID),
		func(tx db.Tx, granted iam.Project) (capacity.Environment, error) {
			project = granted
			return capacity.GetEnvironment(ctx, tx, granted.ID, nodeID, digest)
		})
	return e, project, err
}

// PackageIndex reads where the environments of a project get their packages from.
func (s *Service) PackageIndex(ctx context.Context, p iam.Principal, projectID string) (iam.PackageIndex, error) {
	return read(ctx, s, access.Project(p, iam.EnvironmentRead, projectID),
		func(tx db.Tx, project iam.Project) (iam.PackageIndex, error) {
			i, _, err := iam.GetPackageIndex(ctx, tx, project.ID)
			return i, err
		})
}
