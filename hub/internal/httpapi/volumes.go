package httpapi

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// ListVolumes lists a project's volumes, the newest first.
func (s *Server) ListVolumes(ctx context.Context, r ListVolumesRequestObject) (ListVolumesResponseObject, error) {
	items, next, err := pageByID(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]capacity.Volume, error) {
		return s.Queries.Volumes(ctx, principalOf(ctx), capacity.VolumeFilter{
			ProjectID: r.ProjectID, Status: capacity.VolumeStatus(r.Params.Status), After: p.After, Limit: p.Limit,
		})
	}, func(v capacity.Volume) string { return v.ID })
	return ListVolumes200JSONResponse{Items: views(items, volumeView), NextCursor: next}, err
}

// GetVolume gives one volume, on request once it has changed.
func (s *Server) GetVolume(ctx context.Context, r GetVolumeRequestObject) (GetVolumeResponseObject, error) {
	v, err := s.Queries.Volume(ctx, principalOf(ctx), r.ProjectID, r.VolumeID, watchOf(r.Params.After, r.Params.Wait))
	return GetVolume200JSONResponse(volumeView(v)), err
}

// CreateVolume binds a volume to a node.
func (s *Server) CreateVolume(ctx context.Context, r CreateVolumeRequestObject) (CreateVolumeResponseObject, error) {
	v, err := s.Commands.CreateVolume(ctx, metaFrom(ctx), capacity.NewVolume{
		ProjectID: r.ProjectID, AllocationID: r.Body.AllocationID, Name: r.Body.Name, SizeBytes: r.Body.SizeMib << 20,
	})
	return CreateVolume201JSONResponse(volumeView(v)), err
}

// ResizeVolume begins to make a volume larger.
func (s *Server) ResizeVolume(ctx context.Context, r ResizeVolumeRequestObject) (ResizeVolumeResponseObject, error) {
	v, err := s.Commands.ResizeVolume(ctx, metaFrom(ctx), r.ProjectID, r.VolumeID, r.Body.SizeMib<<20)
	return ResizeVolume202JSONResponse(volumeView(v)), err
}

// DeleteVolume begins the end of a volume.
func (s *Server) DeleteVolume(ctx context.Context, r DeleteVolumeRequestObject) (DeleteVolumeResponseObject, error) {
	v, err := s.Commands.DeleteVolume(ctx, metaFrom(ctx), r.ProjectID, r.VolumeID)
	return DeleteVolume202JSONResponse(volumeView(v)), err
}

// RestoreVolume begins a restore.
func (s *Server) RestoreVolume(ctx context.Context, r RestoreVolumeRequestObject) (RestoreVolumeResponseObject, error) {
	v, err := s.Commands.RestoreVolume(ctx, metaFrom(ctx), r.ProjectID, r.VolumeID, r.Body.SnapshotID)
	return RestoreVolume202JSONResponse(volumeView(v)), err
}

// ListVolumeSnapshots lists the snapshots of a volume, the newest first.
func (s *Server) ListVolumeSnapshots(ctx context.Context,
	r ListVolumeSnapshotsRequestObject,
) (ListVolumeSnapshotsResponseObject, error) {
	items, err := s.Queries.VolumeSnapshots(ctx, principalOf(ctx), r.ProjectID, r.VolumeID)
	return ListVolumeSnapshots200JSONResponse{Items: views(items, snapshotView)}, err
}

// GetVolumeSnapshot gives one snapshot, on request once it has changed.
func (s *Server) GetVolumeSnapshot(ctx context.Context,
	r GetVolumeSnapshotRequestObject,
) (GetVolumeSnapshotResponseObject, error) {
	v, err := s.Queries.VolumeSnapshot(ctx, principalOf(ctx), r.ProjectID, r.VolumeID, r.SnapshotID,
		watchOf(r.Params.After, r.Params.Wait))
	return GetVolumeSnapshot200JSONResponse(snapshotView(v)), err
}

// CreateVolumeSnapshot begins a snapshot.
func (s *Server) CreateVolumeSnapshot(ctx context.Context,
	r CreateVolumeSnapshotRequestObject,
) (CreateVolumeSnapshotResponseObject, error) {
	v, err := s.Commands.CreateVolumeSnapshot(ctx, metaFrom(ctx), r.ProjectID, r.VolumeID, r.Body.Description)
	return CreateVolumeSnapshot201JSONResponse(snapshotView(v)), err
}

// DeleteVolumeSnapshot begins the end of a snapshot.
func (s *Server) DeleteVolumeSnapshot(ctx context.Context,
	r DeleteVolumeSnapshotRequestObject,
) (DeleteVolumeSnapshotResponseObject, error) {
	v, err := s.Commands.DeleteVolumeSnapshot(ctx, metaFrom(ctx), r.ProjectID, r.VolumeID, r.SnapshotID)
	return DeleteVolumeSnapshot202JSONResponse(snapshotView(v)), err
}

func volumeView(v capacity.Volume) Volume {
	return Volume{
		ID:              v.ID,
		ResourceVersion: v.ResourceVersion,
		OrgID:           v.OrgID,
		ProjectID:       v.ProjectID,
		NodeID:          v.NodeID,
		Name:            v.Name,
		SizeMib:         v.SizeBytes >> 20,
		Status:          VolumeStatus(v.Status),
		StatusReason:    v.StatusReason,
		Detail:          v.Detail,
		UsedByMemberIds: append([]string{}, v.UsedBy...),
		CorrelationID:   v.CorrelationID,
		CreatedAt:       v.CreatedAt,
		UpdatedAt:       v.UpdatedAt,
		DeletedAt:       v.DeletedAt,
	}
}

func snapshotView(s capacity.Snapshot) VolumeSnapshot {
	return VolumeSnapshot{
		ID:              s.ID,
		ResourceVersion: s.ResourceVersion,
		VolumeID:        s.VolumeID,
		Description:     s.Description,
		SizeMib:         s.SizeBytes >> 20,
		Status:          VolumeSnapshotStatus(s.Status),
		CorrelationID:   s.CorrelationID,
		CreatedAt:       s.CreatedAt,
		UpdatedAt:       s.UpdatedAt,
		DeletedAt:       s.DeletedAt,
	}
}
