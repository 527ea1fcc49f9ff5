package change

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
)

// ReleaseAllocation releases an allocation, takes its SSH keys out of the node's state, ends its bill once it is free,
// and records that. live is how many of its instances are not being decommissioned.
func ReleaseAllocation(ctx context.Context, tx db.Tx, by By, before capacity.Allocation,
	live int,
) (capacity.Allocation, error) {
	after, err := capacity.Release(ctx, tx, before, live, by.Now)
	if err != nil {
		return capacity.Allocation{}, err
	}
	if err := resolveUnpaid(ctx, tx, after.ID, by.Now); err != nil {
		return capacity.Allocation{}, err
	}
	if after.Status == capacity.Released {
		if err := ledger.CloseSubject(ctx, tx, after.ID, by.Now, by.Now); err != nil {
			return capacity.Allocation{}, err
		}
	}
	if keys, err := capacity.HasSSHKeys(ctx, tx, after.ID); err != nil {
		return capacity.Allocation{}, err
	} else if keys {
		if err := fleet.BumpIntent(ctx, tx, after.NodeID); err != nil {
			return capacity.Allocation{}, err
		}
	}
	return after, RecordAllocation(ctx, tx, by, iam.AllocationRelease, before.Status, after)
}

// RecordAllocation writes the event and the audit row of an allocation's latest status; before is the one it had, empty
// for a new allocation.
func RecordAllocation(ctx context.Context, tx db.Tx, by By, action string, before capacity.Status,
	a capacity.Allocation,
) error {
	e := Entry{
		Event:        a.EventType(),
		Action:       action,
		ResourceType: Allocation,
		ResourceID:   a.ID,
		Version:      a.ResourceVersion,
		OrgID:        a.OrgID,
		ProjectID:    a.ProjectID,
		RequestedBy:  a.RequestedBy,
		Data: map[string]any{
			"to":                string(a.Status),
			"node_id":           a.NodeID,
			"capacity_shape":    string(a.Shape),
			"accelerator_count": a.AcceleratorCount,
		},
		After: map[string]any{"status": a.Status, "node_id": a.NodeID},
	}
	if before != "" {
		e.Data["from"] = string(before)
		e.Before = map[string]any{"status": before}
	}
	return Record(ctx, tx, by, e)
}
