package capacity

import (
	"context"
	"math"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/protocol"
)

// VolumeChange is a change of a volume, or of one of its snapshots where there is one, that follows from a report.
type VolumeChange struct {
	Volume Volume
	// Before is the status before; the same as after where only the reason is another.
	Before   VolumeStatus
	Snapshot *Snapshot
}

// DesiredVolumes describes the volumes that a node keeps, for its state.
func DesiredVolumes(ctx context.Context, tx db.Tx, nodeID string) ([]*protocol.ProjectVolume, error) {
	volumes, snapshots, err := volumesOf(ctx, tx, nodeID)
	if err != nil {
		return nil, err
	}
	out := make([]*protocol.ProjectVolume, 0, len(volumes))
	for _, v := range volumes {
		desired := &protocol.ProjectVolume{
			Id: v.ID, OrgId: v.OrgID, ProjectId: v.ProjectID, SizeBytes: uint64(v.SizeBytes),
			Made: !v.ReadyAt.IsZero(), Deleted: v.Status == VolumeDeleting,
			RestoreNo: uint64(v.RestoreNo), RestoreSnapshotId: v.RestoreSnapshotID,
		}
		for _, s := range snapshots {
			if s.VolumeID == v.ID && !desired.GetDeleted() {
				desired.Snapshots = append(desired.Snapshots, &protocol.VolumeSnapshot{
					Id: s.ID, Deleted: s.Status == VolumeDeleting,
				})
			}
		}
		out = append(out, desired)
	}
	return out, nil
}

// ApplyVolumes stores where the volumes of a node are, as it reports them. What it does not name stays as it is.
// restoredAt is when the hub was last restored from a backup; zero for one that never was.
func ApplyVolumes(ctx context.Context, tx db.Tx, nodeID string, reported []*protocol.VolumeStatus, restoredAt,
	now time.Time,
) (changes []VolumeChange, err error) {
	volumes, snapshots, err := volumesOf(ctx, tx, nodeID)
	if err != nil {
		return nil, err
	}
	status := map[string]*protocol.VolumeStatus{}
	for _, s := range reported {
		status[s.GetId()] = s
	}
	known, err := knownSnapshots(ctx, tx, reported)
	if err != nil {
		return nil, err
	}
	for _, before := range volumes {
		after := before.reported(status[before.ID], now)
		if after.Status != before.Status || after.StatusReason != before.StatusReason || after.Detail != before.Detail {
			if after, err = after.changed(ctx, tx, now); err != nil {
				return nil, err
			}
			changes = append(changes, VolumeChange{Volume: after, Before: before.Status})
		}
		if after.Status == VolumeDeleted {
			if err := endSnapshots(ctx, tx, after.ID, now); err != nil {
				return nil, err
			}
			continue
		}
		for _, s := range snapshots {
			next := s.reported(status[before.ID], now)
			if s.VolumeID != before.ID || next.Status == s.Status {
				continue
			}
			if next, err = next.changed(ctx, tx, now); err != nil {
				return nil, err
			}
			changes = append(changes, VolumeChange{Volume: after, Before: s.Status, Snapshot: &next})
		}
		if !after.mayHaveLost(restoredAt) {
			continue
		}
		lost, err := adoptSnapshots(ctx, tx, after, status[before.ID], known, now)
		if err != nil {
			return nil, err
		}
		for _, s := range lost {
			changes = append(changes, VolumeChange{Volume: after, Snapshot: &s})
		}
	}
	return changes, nil
}

// mayHaveLost reports whether the rows can lack snapshots of the volume: those of a hub that was not restored since the
// volume was made lack none, and a node that reports others has invented them.
func (v Volume) mayHaveLost(restoredAt time.Time) bool {
	return restoredAt.After(v.CreatedAt) || v.RequestedBy.Type == principal.Recovery
}

// knownSnapshots are those of the reported snapshots that the rows know, deleted ones too.
func knownSnapshots(ctx context.Context, tx db.Tx, reported []*protocol.VolumeStatus) (map[string]bool, error) {
	var ids []string
	for _, v := range reported {
		for _, s := range v.GetSnapshots() {
			if db.IsID(s.GetId()) {
				ids = append(ids, s.GetId())
			}
		}
	}
	known := map[string]bool{}
	if len(ids) == 0 {
		return known, nil
	}
	found, err := db.CollectColumn[string](tx.Query(ctx, `SELECT id::TEXT FROM volume_snapshots
		WHERE id = ANY($1::UUID[])`, ids))
	for _, id := range found {
		known[id] = true
	}
	return known, err
}

// adoptSnapshots stores the snapshots that a node keeps of a volume and that the rows have lost. The volume gets no
// more than it may have, whatever its node reports: its tenant pays for them.
func adoptSnapshots(ctx context.Context, tx db.Tx, v Volume, reported *protocol.VolumeStatus, known map[string]bool,
	now time.Time,
) ([]Snapshot, error) {
	lost := unknownSnapshots(v, reported, known, now)
	if len(lost) == 0 {
		return nil, nil
	}
	kept, err := ListSnapshots(ctx, tx, v.ID)
	if err != nil {
		return nil, err
	}
	lost = lost[:min(len(lost), max(protocol.MaxSnapshots-len(kept), 0))]
	for _, s := range lost {
		if err := insertSnapshot(ctx, tx, s); err != nil {
			return nil, err
		}
	}
	return lost, nil
}

// unknownSnapshots are those that a node keeps of a volume and that the rows have lost: they were taken after the
// backup that the hub was restored from.
func unknownSnapshots(v Volume, reported *protocol.VolumeStatus, known map[string]bool,
	now time.Time,
) (lost []Snapshot) {
	if v.ReadyAt.IsZero() || v.Status == VolumeDeleting {
		return nil
	}
	for _, s := range reported.GetSnapshots() {
		if !db.IsID(s.GetId()) || known[s.GetId()] || s.GetStatus() != protocol.VolumeStatus_READY {
			continue
		}
		known[s.GetId()] = true
		lost = append(lost, Snapshot{
			ID: s.GetId(), VolumeID: v.ID, Description: "taken before the platform was restored",
			SizeBytes: min(int64(s.GetSizeBytes()&math.MaxInt64), v.MadeBytes), Status: VolumeReady,
			CorrelationID: v.CorrelationID, ResourceVersion: 1, CreatedAt: now, UpdatedAt: now,
		})
	}
	return lost
}

// reported is the volume after a report; nil reports nothing of it.
func (v Volume) reported(s *protocol.VolumeStatus, now time.Time) Volume {
	if s == nil {
		return v
	}
	done := false
	switch {
	case v.Status == VolumeDeleting:
		if done = s.GetStatus() == protocol.VolumeStatus_DELETED; done {
			v.Status, v.DeletedAt = VolumeDeleted, now
		}
	case s.GetStatus() == protocol.VolumeStatus_MISSING && !v.ReadyAt.IsZero():
		v.Status = VolumeMissing
	case s.GetStatus() != protocol.VolumeStatus_READY || s.GetRestoreNo() < uint64(v.RestoreNo):
	case !v.ReadyAt.IsZero() && v.MadeBytes < v.SizeBytes && s.GetSizeBytes() < uint64(v.SizeBytes):
		v.Status = VolumeResizing // it may have been missing meanwhile
	default:
		v.Status, v.MadeBytes = VolumeReady, v.SizeBytes
		if v.ReadyAt.IsZero() {
			v.ReadyAt = now
		}
	}
	v.StatusReason, v.Detail = cut(s.GetReason()), cut(s.GetDetail())
	if done {
		v.StatusReason, v.Detail = "", ""
	}
	return v
}

// reported is the snapshot after a report of its volume.
func (s Snapshot) reported(volume *protocol.VolumeStatus, now time.Time) Snapshot {
	for _, r := range volume.GetSnapshots() {
		switch {
		case r.GetId() != s.ID:
		case s.Status == VolumePending && r.GetStatus() == protocol.VolumeStatus_READY:
			s.Status = VolumeReady
		case s.Status == VolumeDeleting && r.GetStatus() == protocol.VolumeStatus_DELETED:
			s.Status, s.DeletedAt = VolumeDeleted, now
		}
	}
	return s
}

// LoseVolumes ends the volumes of a node that is gone for good.
func LoseVolumes(ctx context.Context, tx db.Tx, nodeID string, now time.Time) (lost []VolumeChange, err error) {
	volumes, _, err := volumesOf(ctx, tx, nodeID)
	if err != nil {
		return nil, err
	}
	for _, v := range volumes {
		before := v.Status
		v.Status, v.DeletedAt, v.StatusReason, v.Detail = VolumeNodeLost, now, "", ""
		if v, err = v.changed(ctx, tx, now); err != nil {
			return nil, err
		}
		if err := endSnapshots(ctx, tx, v.ID, now); err != nil {
			return nil, err
		}
		lost = append(lost, VolumeChange{Volume: v, Before: before})
	}
	return lost, nil
}

// volumesOf returns the volumes that a node keeps, and those of their snapshots that it is to take or delete.
func volumesOf(ctx context.Context, tx db.Tx, nodeID string) ([]Volume, []Snapshot, error) {
	volumes, err := selectVolumes(ctx, tx, `WHERE v.node_id = $1 AND v.deleted_at IS NULL ORDER BY v.id`, nodeID)
	if err != nil || len(volumes) == 0 {
		return nil, nil, err
	}
	ids := make([]string, 0, len(volumes))
	for _, v := range volumes {
		ids = append(ids, v.ID)
	}
	snapshots, err := selectSnapshots(ctx, tx, `WHERE volume_id = ANY($1::UUID[]) AND status IN ('pending', 'deleting')
		ORDER BY id`, ids)
	return volumes, snapshots, err
}
