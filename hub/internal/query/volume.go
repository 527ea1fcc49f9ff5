package query

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// Volumes lists a project's volumes, the newest first.
func (s *Service) Volumes(ctx context.Context, p iam.Principal, f capacity.VolumeFilter) ([]capacity.Volume, error) {
	return list(ctx, s, access.Project(p, iam.VolumeRead, f.ProjectID), capacity.ListVolumes, f)
}

// Volume reads one volume.
func (s *Service) Volume(ctx context.Context, p iam.Principal, projectID, id string, w Watch) (capacity.Volume, error) {
	return await(ctx, s, id, w, func() (capacity.Volume, int64, error) {
		v, err := read(ctx, s, access.Project(p, iam.VolumeRead, projectID), volumeOf(ctx, id))
		return v, v.ResourceVersion, err
	})
}

// VolumeSnapshots lists the snapshots of a volume, the newest first.
func (s *Service) VolumeSnapshots(ctx context.Context, p iam.Principal, projectID, volumeID string,
) ([]capacity.Snapshot, error) {
	return read(ctx, s, access.Project(p, iam.VolumeRead, projectID),
		func(tx db.Tx, project iam.Project) ([]capacity.Snapshot, error) {
			v, err := volumeOf(ctx, volumeID)(tx, project)
			if err != nil {
				return nil, err
			}
			return capacity.ListSnapshots(ctx, tx, v.ID)
		})
}

// VolumeSnapshot reads one of them.
func (s *Service) VolumeSnapshot(ctx context.Context, p iam.Principal, projectID, volumeID, id string, w Watch,
) (capacity.Snapshot, error) {
	return await(ctx, s, id, w, func() (capacity.Snapshot, int64, error) {
		snapshot, err := read(ctx, s, access.Project(p, iam.VolumeRead, projectID),
			func(tx db.Tx, project iam.Project) (capacity.Snapshot, error) {
				v, err := volumeOf(ctx, volumeID)(tx, project)
				if err != nil {
					return capacity.Snapshot{}, err
				}
				return capacity.GetSnapshot(ctx, tx, v.ID, id)
			})
		return snapshot, snapshot.ResourceVersion, err
	})
}

func volumeOf(ctx context.Context, id string) func(db.Tx, iam.Project) (capacity.Volume, error) {
	return func(tx db.Tx, project iam.Project) (capacity.Volume, error) {
		return capacity.GetVolume(ctx, tx, project.ID, id)
	}
}
