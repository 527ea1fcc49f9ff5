package nodes

import (
	"context"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/protocol"
)

// applyInventories stores the accelerators that nodes report. A change of the health of one is an event of the node,
// for its operators, and one of each app instance that has it, for the tenants; within the budget of the node.
func applyInventories(ctx context.Context, tx db.Tx, b *budgets, reported map[origin][]*protocol.Accelerator,
	now time.Time,
) error {
	from, byID := map[string]origin{}, map[string][]*protocol.Accelerator{}
	for o, inventory := range reported {
		from[o.nodeID], byID[o.nodeID] = o, inventory
	}
	changes, err := capacity.ApplyInventories(ctx, tx, byID, now)
	if err != nil {
		return err
	}
	for _, c := range changes {
		if !b.mayRecordHealth(c.NodeID, now) {
			continue
		}
		data := map[string]any{"accelerator_id": c.AcceleratorID, "health": c.Health}
		if c.Cause != "" {
			data["cause"] = c.Cause
		}
		if !c.IsPart {
			err := nodeEvent(ctx, tx, from[c.NodeID], "fleet.node.accelerator_health", actionReport, data, now)
			if err != nil {
				return err
			}
		}
		if err := recordInstanceHealth(ctx, tx, c, data, now); err != nil {
			return err
		}
	}
	return nil
}

// recordInstanceHealth writes the events of the instances that have the accelerator.
func recordInstanceHealth(ctx context.Context, tx db.Tx, c capacity.HealthChange, data map[string]any,
	now time.Time,
) error {
	members, err := capacity.MembersWith(ctx, tx, c.NodeID, c.AcceleratorID)
	if err != nil || len(members) == 0 {
		return err
	}
	instances, err := instance.OfMembers(ctx, tx, c.NodeID, members)
	if err != nil {
		return err
	}
	for _, i := range instances {
		for _, m := range i.Members {
			if !slices.Contains(members, m.ID) {
				continue
			}
			data["member_id"] = m.ID
			version, err := instance.NextVersion(ctx, tx, i.ID, now)
			if err != nil {
				return err
			}
			err = change.Append(ctx, tx, origin{nodeID: c.NodeID}.following(i.Operation, now), change.Entry{
				Event:        "apps.instance.accelerator_health",
				ResourceType: change.Instance,
				ResourceID:   i.ID,
				Version:      version,
				OrgID:        i.OrgID,
				ProjectID:    i.ProjectID,
				Data:         data,
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}
