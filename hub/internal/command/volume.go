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
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/quota"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// CreateVolume binds a volume of the project to a node and answers with it in status pending. The node makes it once it
// is connected.
func (s *Service) CreateVolume(ctx context.Context, m Meta, in capacity.NewVolume) (capacity.Volume, error) {
	check := access.Project(m.Principal, iam.VolumeCreate, in.ProjectID)
	return once(ctx, s, m, check, func(tx db.Tx, project iam.Project) (capacity.Volume, error) {
		in.ProjectID = project.ID
		nodeID, err := capacity.VolumeNode(ctx, tx, in)
		if err != nil {
			return capacity.Volume{}, err
		}
		room, err := volumeRoom(ctx, tx, nodeID)
		if err != nil {
			return capacity.Volume{}, err
		}
		if err := quota.CheckVolume(ctx, tx, project.OrgID, in.SizeBytes); err != nil {
			return capacity.Volume{}, err
		}
		v := capacity.Volume{
			ID: db.NewID(), OrgID: project.OrgID, ProjectID: project.ID, NodeID: nodeID, Name: in.Name,
			SizeBytes: in.SizeBytes, Status: capacity.VolumePending, RequestedBy: m.Principal.Actor(),
			CorrelationID: m.CorrelationID, ResourceVersion: 1, CreatedAt: m.Now, UpdatedAt: m.Now,
		}
		if err := capacity.CreateVolume(ctx, tx, v, room); err != nil {
			return capacity.Volume{}, err
		}
		if err := checkFunds(ctx, tx, m, v, v.SizeBytes); err != nil {
			return capacity.Volume{}, err
		}
		return v, change.CompleteVolume(ctx, tx, m.by(), iam.VolumeCreate, capacity.VolumeChange{Volume: v})
	})
}

// volumeRoom is what volumes may take of a node's disk; a node that takes nothing new gets no volume either.
func volumeRoom(ctx context.Context, tx db.Tx, nodeID string) (int64, error) {
	node, err := fleet.Get(ctx, tx, nodeID)
	if err != nil {
		return 0, err
	}
	switch {
	case !node.TakesNew():
		return 0, fault.New(fault.Conflict, capacity.CodeInsufficient, "The node takes nothing new.", nil)
	case !slices.Contains(node.Features, manifest.FeatureProjectVolumes):
		return 0, fault.New(fault.Conflict, codeVolumesUnsupported, "The node cannot keep volumes of projects: its agent is "+
			"older, or its machine lacks loop devices, ext4 or e2fsprogs.", nil)
	}
	return fleet.VolumeBytes(ctx, tx, node)
}

// checkFunds refuses bytes of a volume, or more of them, whose first hour the wallet does not cover: an empty wallet
// ends no volume.
func checkFunds(ctx context.Context, tx db.Tx, m Meta, v capacity.Volume, bytes int64) error {
	s := change.VolumeSubject(v, m.Now)
	s.VolumeBytes = bytes
	return ledger.CheckFunds(ctx, tx, s)
}

// volumeToChange reads a volume of a project in which the caller has the permission.
func volumeToChange(m Meta, permission iam.Permission, projectID, id string) access.Check[capacity.Volume] {
	inProject := access.Project(m.Principal, permission, projectID)
	return func(ctx context.Context, tx db.Tx) (capacity.Volume, error) {
		project, err := inProject(ctx, tx)
		if err != nil {
			return capacity.Volume{}, err
		}
		return capacity.GetVolume(ctx, tx, project.ID, id)
	}
}

// ResizeVolume asks a volume's node to make it larger, and answers with it in status resizing. It may be in use.
func (s *Service) ResizeVolume(ctx context.Context, m Meta, projectID, id string, sizeBytes int64,
) (capacity.Volume, error) {
	check := volumeToChange(m, iam.VolumeCreate, projectID, id)
	return run(ctx, s, check, func(tx db.Tx, before capacity.Volume) (capacity.Volume, error) {
		room, err := volumeRoom(ctx, tx, before.NodeID)
		if err != nil {
			return capacity.Volume{}, err
		}
		if err := quota.CheckVolume(ctx, tx, before.OrgID, max(sizeBytes-before.SizeBytes, 0)); err != nil {
			return capacity.Volume{}, err
		}
		after, err := capacity.ResizeVolume(ctx, tx, before, sizeBytes, room, m.Now)
		if err != nil || after.SizeBytes == before.SizeBytes {
			return after, err
		}
		if err := checkFunds(ctx, tx, m, after, after.SizeBytes-before.SizeBytes); err != nil {
			return capacity.Volume{}, err
		}
		return after, change.CompleteVolume(ctx, tx, m.by(), iam.VolumeCreate,
			capacity.VolumeChange{Volume: after, Before: before.Status})
	})
}

// DeleteVolume asks a volume's node to delete it, with its snapshots, and answers with it in status deleting.
func (s *Service) DeleteVolume(ctx context.Context, m Meta, projectID, id string) (capacity.Volume, error) {
	check := volumeToChange(m, iam.VolumeDelete, projectID, id)
	return run(ctx, s, check, func(tx db.Tx, before capacity.Volume) (capacity.Volume, error) {
		after, err := capacity.DeleteVolume(ctx, tx, before, m.Now)
		if err != nil || after.Status == before.Status {
			return after, err
		}
		return after, change.CompleteVolume(ctx, tx, m.by(), iam.VolumeDelete,
			capacity.VolumeChange{Volume: after, Before: before.Status})
	})
}

// RestoreVolume gives a volume the content of one of its snapshots, and answers with it in status restoring. Instances
// that use it must be stopped, or failed with their containers ended.
func (s *Service) RestoreVolume(ctx context.Context, m Meta, projectID, id,
	snapshotID string,
) (capacity.Volume, error) {
	check := volumeToChange(m, iam.VolumeRestore, projectID, id)
	return once(ctx, s, m, check, func(tx db.Tx, before capacity.Volume) (capacity.Volume, error) {
		snapshot, err := capacity.GetSnapshot(ctx, tx, before.ID, snapshotID)
		if fault.Is(err, fault.NotFound) {
			err = fault.New(fault.Unprocessable, codeSnapshotUnknown, "The volume has no such snapshot.", nil).
				WithField("/snapshot_id", "names no snapshot of this volume")
		}
		if err != nil {
			return capacity.Volume{}, err
		}
		for _, memberID := range before.UsedBy {
			i, err := instance.OfMember(ctx, tx, memberID)
			if err != nil {
				return capacity.Volume{}, err
			}
			if !standsStill(i, memberID) {
				return capacity.Volume{}, capacity.ErrVolumeInUse()
			}
		}
		after, err := capacity.RestoreVolume(ctx, tx, before, snapshot, m.Now)
		if err != nil {
			return capacity.Volume{}, err
		}
		return after, change.CompleteVolume(ctx, tx, m.by(), iam.VolumeRestore,
			capacity.VolumeChange{Volume: after, Before: before.Status})
	})
}

// standsStill reports whether no container of the member runs, and none starts before the instance is started. A failed
// instance cannot be stopped: its node ends the containers by itself, and says so.
func standsStill(i instance.Instance, memberID string) bool {
	if i.Lifecycle.Status == lifecycle.Failed {
		return slices.ContainsFunc(i.Members, func(m instance.Member) bool {
			return m.ID == memberID && m.Status == protocol.WorkloadStatus_STOPPED
		})
	}
	return i.Lifecycle.Status == lifecycle.Stopped
}

// CreateVolumeSnapshot asks a volume's node for a copy and answers with it in status pending.
func (s *Service) CreateVolumeSnapshot(ctx context.Context, m Meta, projectID, id, description string,
) (capacity.Snapshot, error) {
	check := volumeToChange(m, iam.VolumeSnapshot, projectID, id)
	return once(ctx, s, m, check, func(tx db.Tx, v capacity.Volume) (capacity.Snapshot, error) {
		room, err := volumeRoom(ctx, tx, v.NodeID)
		if err != nil {
			return capacity.Snapshot{}, err
		}
		if err := quota.CheckVolume(ctx, tx, v.OrgID, v.SizeBytes); err != nil {
			return capacity.Snapshot{}, err
		}
		snapshot := capacity.Snapshot{
			ID: db.NewID(), VolumeID: v.ID, Description: description, SizeBytes: v.SizeBytes,
			Status: capacity.VolumePending, CorrelationID: m.CorrelationID, ResourceVersion: 1, CreatedAt: m.Now,
			UpdatedAt: m.Now,
		}
		if err := capacity.CreateSnapshot(ctx, tx, v, snapshot, room); err != nil {
			return capacity.Snapshot{}, err
		}
		if err := checkFunds(ctx, tx, m, v, snapshot.SizeBytes); err != nil {
			return capacity.Snapshot{}, err
		}
		return snapshot, change.CompleteVolume(ctx, tx, m.by(), iam.VolumeSnapshot,
			capacity.VolumeChange{Volume: v, Snapshot: &snapshot})
	})
}

// DeleteVolumeSnapshot asks a volume's node to delete a snapshot and answers with it in status deleting.
func (s *Service) DeleteVolumeSnapshot(ctx context.Context, m Meta, projectID, id, snapshotID string,
) (capacity.Snapshot, error) {
	check := volumeToChange(m, iam.VolumeSnapshot, projectID, id)
	return run(ctx, s, check, func(tx db.Tx, v capacity.Volume) (capacity.Snapshot, error) {
		before, err := capacity.GetSnapshot(ctx, tx, v.ID, snapshotID)
		if err != nil {
			return capacity.Snapshot{}, err
		}
		after, err := capacity.DeleteSnapshot(ctx, tx, v, before, m.Now)
		if err != nil || after.Status == before.Status {
			return after, err
		}
		return after, change.CompleteVolume(ctx, tx, m.by(), iam.VolumeSnapshot,
			capacity.VolumeChange{Volume: v, Before: before.Status, Snapshot: &after})
	})
}
