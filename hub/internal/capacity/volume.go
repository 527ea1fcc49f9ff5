package capacity

import (
	"context"
	"fmt"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// VolumeStatus is where a volume or one of its snapshots is.
type VolumeStatus string

// The statuses of a volume. A snapshot is pending, ready, deleting or deleted.
const (
	// VolumePending: the node has not made it yet; it does so once it is connected and has the space.
	VolumePending VolumeStatus = "pending"
	VolumeReady   VolumeStatus = "ready"
	// VolumeResizing: the node has it, and makes it larger.
	VolumeResizing  VolumeStatus = "resizing"
	VolumeRestoring VolumeStatus = "restoring"
	// VolumeMissing: the node had it and has it no more.
	VolumeMissing  VolumeStatus = "missing"
	VolumeDeleting VolumeStatus = "deleting"
	VolumeDeleted  VolumeStatus = "deleted"
	VolumeNodeLost VolumeStatus = "node_lost"
)

// Volume is a directory of a project on one node. It outlives app instances. The volumes of an instance itself are not
// among these.
type Volume struct {
	ID        string
	OrgID     string
	ProjectID string
	NodeID    string
	Name      string
	// SizeBytes is what it is to have, MadeBytes what its node has made: less while it is being resized, and none before
	// it is there.
	SizeBytes, MadeBytes int64
	Status               VolumeStatus
	// StatusReason is the code of what keeps it from being ready or deleted, Detail the node's text.
	StatusReason string
	Detail       string
	// RestoreNo counts the restores; RestoreSnapshotID is the source of the last one, empty before the first.
	RestoreNo         int64
	RestoreSnapshotID string
	// UsedBy are the members that have it, until they are removed from the node.
	UsedBy          []string
	RequestedBy     principal.Actor
	CorrelationID   string
	ResourceVersion int64
	CreatedAt       time.Time
	UpdatedAt       time.Time
	// ReadyAt is when the node first had it.
	ReadyAt   time.Time
	DeletedAt time.Time
}

// EventType names the event of the volume's latest status.
func (v Volume) EventType() string { return "capacity.volume." + string(v.Status) }

// Snapshot is a copy of a volume, on the same node.
type Snapshot struct {
	ID              string
	VolumeID        string
	Description     string
	SizeBytes       int64
	Status          VolumeStatus
	CorrelationID   string
	ResourceVersion int64
	CreatedAt       time.Time
	UpdatedAt       time.Time
	DeletedAt       time.Time
}

// EventType names the event of the snapshot's latest status.
func (s Snapshot) EventType() string { return "capacity.volume_snapshot." + string(s.Status) }

// NewVolume is what a project asks for.
type NewVolume struct {
	ProjectID string
	// AllocationID is one on the node that the volume is bound to; empty where all of the project's are on one node.
	AllocationID string
	Name         string
	SizeBytes    int64
}

// VolumeNode returns the node that a new volume is bound to: only one on which the project has capacity.
func VolumeNode(ctx context.Context, tx db.Tx, n NewVolume) (nodeID string, err error) {
	if n.AllocationID != "" {
		a, err := Get(ctx, tx, n.ProjectID, n.AllocationID)
		if err == nil && a.Status == Active {
			return a.NodeID, nil
		}
		if err != nil && !fault.Is(err, fault.NotFound) {
			return "", err
		}
		return "", fault.New(fault.Unprocessable, codeAllocationUnknown, "The allocation is not an active one of this "+
			"project.", nil).WithField("/allocation_id", "names no active allocation of this project")
	}
	nodes, err := db.CollectColumn[string](tx.Query(ctx, `SELECT DISTINCT node_id::TEXT FROM allocations
		WHERE project_id = $1 AND status = 'active' LIMIT 2`, n.ProjectID))
	if err != nil {
		return "", err
	}
	if len(nodes) != 1 {
		return "", fault.New(fault.Conflict, codePlacementRequired, "A volume is bound to a node: name an allocation of "+
			"this project on that node.", nil).WithField("/allocation_id", "is needed here")
	}
	return nodes[0], nil
}

// CreateVolume stores a volume of the node, in status pending; roomBytes is what volumes may take of the node's disk.
// No org takes more than half of the volumes that a node may keep.
func CreateVolume(ctx context.Context, tx db.Tx, v Volume, roomBytes int64) error {
	if err := checkRoom(ctx, tx, v.NodeID, v.SizeBytes, roomBytes); err != nil {
		return err
	}
	count, err := VolumesOn(ctx, tx, v.NodeID)
	if err != nil {
		return err
	}
	ofOrg, err := db.Value[int](ctx, tx, `SELECT count(*) FROM volumes WHERE node_id = $1 AND org_id = $2
		AND deleted_at IS NULL`, v.NodeID, v.OrgID)
	if err != nil {
		return err
	}
	if count >= protocol.MaxVolumes || ofOrg >= protocol.MaxVolumes/2 {
		return fault.New(fault.Conflict, CodeInsufficient, fmt.Sprintf("The node keeps %d volumes already, %d of this org.",
			count, ofOrg), nil)
	}
	return insertVolume(ctx, tx, v)
}

// checkRoom refuses what the node's disk cannot hold beside all volumes and snapshots that it is to keep. The node
// decides again: images and volumes of instances take their part of the same disk.
func checkRoom(ctx context.Context, tx db.Tx, nodeID string, moreBytes, roomBytes int64) error {
	held, err := volumeBytes(ctx, tx, `v.size_bytes`, `v.node_id = $1`, nodeID)
	if err == nil && held+moreBytes > roomBytes {
		err = fault.New(fault.Conflict, CodeInsufficient, fmt.Sprintf("The volumes and snapshots of the node may take %d "+
			"MiB of its disk, and %d MiB are promised.", roomBytes/mebibyte, held/mebibyte), nil)
	}
	return err
}

// VolumeBytesOfOrg is what the volumes and snapshots of an org take.
func VolumeBytesOfOrg(ctx context.Context, tx db.Tx, orgID string) (int64, error) {
	return volumeBytes(ctx, tx, `v.size_bytes`, `v.org_id = $1`, orgID)
}

// VolumeBytes is what a volume takes, as its node has made it, with those of its snapshots that are there or on their
// way. One that is missing takes nothing but its snapshots.
func VolumeBytes(ctx context.Context, tx db.Tx, id string) (int64, error) {
	return volumeBytes(ctx, tx, `CASE v.status WHEN 'missing' THEN 0 ELSE v.made_bytes END`, `v.id = $1`, id)
}

// VolumesOn returns how many volumes a node keeps.
func VolumesOn(ctx context.Context, tx db.Tx, nodeID string) (int, error) {
	return db.Value[int](ctx, tx, `SELECT count(*) FROM volumes WHERE node_id = $1 AND deleted_at IS NULL`, nodeID)
}

// GetVolume returns a volume of the project, a deleted one too; one of another project answers as if it did not exist.
func GetVolume(ctx context.Context, tx db.Tx, projectID, id string) (Volume, error) {
	if !db.IsID(id) {
		return Volume{}, errNoVolume()
	}
	list, err := selectVolumes(ctx, tx, `WHERE v.project_id = $1 AND v.id = $2`, projectID, id)
	if err == nil && len(list) == 0 {
		err = errNoVolume()
	}
	if err != nil {
		return Volume{}, err
	}
	return list[0], nil
}

func errNoVolume() error {
	return fault.New(fault.NotFound, fault.CodeNotFound, "There is no such volume in this project.", nil)
}

// VolumeFilter narrows a listing; After is the last id of the page before.
type VolumeFilter struct {
	ProjectID string
	Status    VolumeStatus
	After     string
	Limit     int
}

// ListVolumes returns a page of a project's volumes, newest first; deleted ones only where they are asked for.
func ListVolumes(ctx context.Context, tx db.Tx, f VolumeFilter) ([]Volume, error) {
	var w db.Where
	w.And("v.project_id = " + w.Arg(f.ProjectID))
	if f.Status == "" {
		w.And("v.status <> 'deleted'")
	}
	w.Compare("v.status =", string(f.Status))
	w.Compare("v.id <", f.After)
	newest := " ORDER BY v.id DESC LIMIT " + w.Arg(f.Limit)
	return selectVolumes(ctx, tx, w.SQL()+newest, w.Args...)
}

// ResizeVolume asks the node to make a volume larger; roomBytes is what volumes may take of the node's disk. Asking for
// the size that it has changes nothing.
func ResizeVolume(ctx context.Context, tx db.Tx, v Volume, sizeBytes, roomBytes int64, now time.Time) (Volume, error) {
	switch {
	case v.Status != VolumeReady && v.Status != VolumeResizing:
		return v, errVolumeStatus(v)
	case sizeBytes < v.SizeBytes:
		return v, fault.New(fault.Unprocessable, fault.CodeInvalid, "A volume never becomes smaller.", nil).
			WithField("/size_mib", fmt.Sprintf("must be at least %d", v.SizeBytes/mebibyte)).Permanent()
	case sizeBytes == v.SizeBytes:
		return v, nil
	}
	if err := checkRoom(ctx, tx, v.NodeID, sizeBytes-v.SizeBytes, roomBytes); err != nil {
		return v, err
	}
	v.Status, v.SizeBytes = VolumeResizing, sizeBytes
	return v.changed(ctx, tx, now)
}

// DeleteVolume asks the node to delete a volume that no member has, with its snapshots. Asking again changes nothing.
func DeleteVolume(ctx context.Context, tx db.Tx, v Volume, now time.Time) (Volume, error) {
	switch {
	case v.Status == VolumeDeleting || v.Status == VolumeDeleted:
		return v, nil
	case v.Status == VolumeNodeLost:
		return v, errVolumeStatus(v)
	case len(v.UsedBy) > 0:
		return v, errVolumeInUse("Decommission the app instances that use it first.")
	}
	v.Status, v.StatusReason, v.Detail = VolumeDeleting, "", ""
	return v.changed(ctx, tx, now)
}

// RestoreVolume asks the node to give a volume the content of one of its snapshots; what it has now is lost. The caller
// has checked that no container uses it.
func RestoreVolume(ctx context.Context, tx db.Tx, v Volume, s Snapshot, now time.Time) (Volume, error) {
	switch {
	case v.Status != VolumeReady:
		return v, errVolumeStatus(v)
	case s.Status != VolumeReady:
		return v, fault.New(fault.Conflict, codeVolumeStatus, "The snapshot is "+string(s.Status)+".", nil).
			WithField("/snapshot_id", "names a snapshot that is not ready")
	}
	v.Status, v.RestoreSnapshotID = VolumeRestoring, s.ID
	v.RestoreNo++
	return v.changed(ctx, tx, now)
}

// CreateSnapshot stores a snapshot of a volume, in status pending. The volume may be in use.
func CreateSnapshot(ctx context.Context, tx db.Tx, v Volume, s Snapshot, roomBytes int64) error {
	if v.Status != VolumeReady {
		return errVolumeStatus(v)
	}
	kept, err := ListSnapshots(ctx, tx, v.ID)
	if err != nil {
		return err
	}
	if len(kept) >= protocol.MaxSnapshots {
		return fault.New(fault.Conflict, codeSnapshotsTooMany, fmt.Sprintf("A volume has at most %d snapshots; delete one.",
			protocol.MaxSnapshots), nil)
	}
	if err := checkRoom(ctx, tx, v.NodeID, s.SizeBytes, roomBytes); err != nil {
		return err
	}
	return insertSnapshot(ctx, tx, s)
}

// ListSnapshots returns the snapshots of a volume that are not deleted, newest first.
func ListSnapshots(ctx context.Context, tx db.Tx, volumeID string) ([]Snapshot, error) {
	return selectSnapshots(ctx, tx, `WHERE volume_id = $1 AND deleted_at IS NULL ORDER BY id DESC`, volumeID)
}

// GetSnapshot returns a snapshot of a volume, a deleted one too.
func GetSnapshot(ctx context.Context, tx db.Tx, volumeID, id string) (Snapshot, error) {
	list, err := selectSnapshots(ctx, tx, `WHERE volume_id = $1 AND id::TEXT = $2`, volumeID, id)
	if err == nil && len(list) == 0 {
		err = fault.New(fault.NotFound, fault.CodeNotFound, "The volume has no such snapshot.", nil)
	}
	if err != nil {
		return Snapshot{}, err
	}
	return list[0], nil
}

// DeleteSnapshot asks the node to delete a snapshot. Asking again changes nothing.
func DeleteSnapshot(ctx context.Context, tx db.Tx, v Volume, s Snapshot, now time.Time) (Snapshot, error) {
	switch {
	case s.Status == VolumeDeleting || s.Status == VolumeDeleted:
		return s, nil
	case v.Status == VolumeRestoring && v.RestoreSnapshotID == s.ID:
		return s, fault.New(fault.Conflict, codeVolumeStatus, "The volume is being restored from this snapshot.", nil)
	}
	s.Status = VolumeDeleting
	return s.changed(ctx, tx, now)
}

func errVolumeStatus(v Volume) error {
	return fault.New(fault.Conflict, codeVolumeStatus, "The volume "+v.Name+" is "+string(v.Status)+".", nil)
}

func errVolumeInUse(remedy string) error {
	return fault.New(fault.Conflict, codeVolumeInUse, "App instances use the volume. "+remedy, nil)
}

// ErrVolumeInUse refuses a restore below running containers.
func ErrVolumeInUse() error { return errVolumeInUse("Stop them first.") }

func (v Volume) changed(ctx context.Context, tx db.Tx, now time.Time) (Volume, error) {
	v.UpdatedAt = now
	v.ResourceVersion++
	return v, updateVolume(ctx, tx, v)
}

func (s Snapshot) changed(ctx context.Context, tx db.Tx, now time.Time) (Snapshot, error) {
	s.UpdatedAt = now
	s.ResourceVersion++
	return s, updateSnapshot(ctx, tx, s)
}
