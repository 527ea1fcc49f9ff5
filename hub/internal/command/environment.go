package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// packageIndexAAD binds a sealed index to its project.
func packageIndexAAD(projectID string) []byte { return []byte("package_index\x00" + projectID) }

// PutPackageIndex sets where the environments of a project get their packages from; an empty address removes it.
// Instances that exist get it with their next upgrade.
func (s *Service) PutPackageIndex(ctx context.Context, m Meta, projectID, address, username, password, caPEM string,
) (iam.PackageIndex, error) {
	check := access.Project(m.Principal, iam.EnvironmentManage, projectID)
	return run(ctx, s, check, func(tx db.Tx, project iam.Project) (iam.PackageIndex, error) {
		before, _, err := iam.GetPackageIndex(ctx, tx, project.ID)
		if err != nil && (address == "" || !fault.Is(err, fault.NotFound)) {
			return iam.PackageIndex{}, err
		}
		sealed := []byte{}
		if address != "" {
			full, err := iam.SecretPackageIndex(address, username, password, caPEM)
			if err != nil {
				return iam.PackageIndex{}, err
			}
			if sealed, err = s.Sealer.Seal([]byte(full), packageIndexAAD(project.ID)); err != nil {
				return iam.PackageIndex{}, err
			}
		}
		after, err := iam.PutPackageIndex(ctx, tx, project.ID, iam.PackageIndex{
			URL: address, Username: username, OwnCA: caPEM != "", UpdatedAt: m.Now,
		}, sealed)
		if err != nil {
			return iam.PackageIndex{}, err
		}
		return after, change.Record(ctx, tx, m.by(), change.Entry{
			Event:        "apps.package_index.updated",
			Action:       iam.EnvironmentManage,
			ResourceType: resourcePackageIndex,
			ResourceID:   project.ID,
			Version:      after.ResourceVersion,
			OrgID:        project.OrgID,
			ProjectID:    project.ID,
			Data:         map[string]any{"url": address},
			Before:       map[string]string{"url": before.URL, "username": before.Username},
			After:        map[string]string{"url": address, "username": username},
		})
	})
}

// openPackageIndex returns a project's SecretPackageIndex; empty where it has none.
func (s *Service) openPackageIndex(ctx context.Context, tx db.Tx, projectID string) ([]byte, error) {
	_, sealed, err := iam.GetPackageIndex(ctx, tx, projectID)
	if fault.Is(err, fault.NotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return s.Sealer.Open(sealed, packageIndexAAD(projectID))
}

// ForgetEnvironment records that a node has removed an environment.
func (s *Service) ForgetEnvironment(ctx context.Context, m Meta, projectID, nodeID, digest string) error {
	check := access.Project(m.Principal, iam.EnvironmentManage, projectID)
	return do(ctx, s, check, func(tx db.Tx, project iam.Project) error {
		if err := capacity.RemoveEnvironment(ctx, tx, project.ID, nodeID, digest); err != nil {
			return err
		}
		return change.Record(ctx, tx, m.by(), change.Entry{
			Event:        "apps.environment.removed",
			Action:       iam.EnvironmentManage,
			ResourceType: resourceEnvironment,
			ResourceID:   nodeID + "/" + digest,
			OrgID:        project.OrgID,
			ProjectID:    project.ID,
			Data:         map[string]any{"node_id": nodeID, "digest": digest},
		})
	})
}
