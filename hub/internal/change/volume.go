package change

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
)

// CompleteVolume records a change of a volume or a snapshot, and that its node is to hold something else.
func CompleteVolume(ctx context.Context, tx db.Tx, by By, action string, c capacity.VolumeChange) error {
	// The size of a volume that is being resized may be another than the one before.
	if c.Snapshot != nil || c.Volume.Status != c.Before || c.Volume.Status == capacity.VolumeResizing {
		if err := fleet.BumpIntent(ctx, tx, c.Volume.NodeID); err != nil {
			return err
		}
	}
	if err := billVolume(ctx, tx, c, by); err != nil {
		return err
	}
	return RecordVolume(ctx, tx, by, action, c)
}

// billVolume bills what the volume takes of its node's disk, from when it is first there until it is gone: nothing of
// one that the node has lost but its snapshots. A larger size is billed once the node has made it.
func billVolume(ctx context.Context, tx db.Tx, c capacity.VolumeChange, by By) error {
	v := c.Volume
	switch {
	case v.ReadyAt.IsZero():
		return nil
	case v.Status == capacity.VolumeDeleted || v.Status == capacity.VolumeNodeLost:
		return ledger.CloseSubject(ctx, tx, v.ID, by.Now, by.Now)
	case v.Status == capacity.VolumeDeleting && c.Snapshot == nil:
		return nil // as before, until it is deleted
	case c.Snapshot != nil, v.Status == capacity.VolumeMissing, c.Before == capacity.VolumeMissing,
		v.Status == capacity.VolumeReady && c.Before != capacity.VolumePending:
		bytes, err := capacity.VolumeBytes(ctx, tx, v.ID)
		if err != nil {
			return err
		}
		return ledger.ResizeVolume(ctx, tx, v.ID, bytes, by.Now)
	case c.Before == capacity.VolumePending:
		return ledger.OpenSubject(ctx, tx, VolumeSubject(v, by.Now))
	}
	return nil
}

// VolumeSubject is what is billed of a volume.
func VolumeSubject(v capacity.Volume, from time.Time) ledger.Subject {
	return ledger.Subject{
		ID:            v.ID,
		Kind:          ledger.Volume,
		OrgID:         v.OrgID,
		ProjectID:     v.ProjectID,
		NodeID:        v.NodeID,
		CorrelationID: v.CorrelationID,
		VolumeBytes:   v.SizeBytes,
		OpenedAt:      from,
	}
}

// RecordVolume writes the event and the audit row of the latest status of a volume, or of a snapshot. Before is empty
// for a new one.
func RecordVolume(ctx context.Context, tx db.Tx, by By, action string, c capacity.VolumeChange) error {
	v := c.Volume
	e := Entry{
		Event:        v.EventType(),
		Action:       action,
		ResourceType: Volume,
		ResourceID:   v.ID,
		Version:      v.ResourceVersion,
		OrgID:        v.OrgID,
		ProjectID:    v.ProjectID,
		Reason:       v.StatusReason,
		Data:         map[string]any{"to": string(v.Status), "node_id": v.NodeID, "size_bytes": v.SizeBytes},
		After:        map[string]any{"status": v.Status, "node_id": v.NodeID, "size_bytes": v.SizeBytes},
	}
	if v.StatusReason != "" {
		e.Data["reason"] = v.StatusReason
	}
	if s := c.Snapshot; s != nil {
		e.Event, e.ResourceType, e.ResourceID, e.Version = s.EventType(), Snapshot, s.ID, s.ResourceVersion
		e.Reason, e.After = "", map[string]any{"status": s.Status, "volume_id": v.ID}
		e.Data = map[string]any{"to": string(s.Status), "volume_id": v.ID, "size_bytes": s.SizeBytes}
	}
	if c.Before != "" {
		e.Data["from"] = string(c.Before)
		e.Before = map[string]any{"status": c.Before}
	}
	return Record(ctx, tx, by, e)
}
