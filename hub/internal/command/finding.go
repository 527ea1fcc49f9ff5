package command

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
)

// ActionAdopt is the audit action of findings and of what a restored hub adopts from its nodes.
const ActionAdopt = "hub.recovery.adopt"

// AddFinding stores a finding, with its event and audit row where it is news.
func AddFinding(ctx context.Context, tx db.Tx, f finding.Finding) error {
	news, err := finding.Add(ctx, tx, f)
	if err != nil || !news {
		return err
	}
	data := map[string]any{"node_id": f.NodeID, "kind": f.Kind, "resource_type": f.ResourceType, "detail": f.Detail}
	if err := event.Append(ctx, tx, event.Event{
		Type: "hub.recovery.finding", Subject: f.ResourceID, ResourceVersion: 1,
		CorrelationID: f.NodeID, Data: data, At: f.At,
	}); err != nil {
		return err
	}
	return event.Audit(ctx, tx, event.AuditRow{
		Actor: principal.Actor{Type: principal.System}, Action: ActionAdopt, ResourceType: f.ResourceType,
		ResourceID:    f.ResourceID,
		CorrelationID: f.NodeID, Reason: f.Kind, After: data, At: f.At,
	})
}

// RecordNodeAdopted writes the event and the audit row of a node that a restored hub did not know.
func RecordNodeAdopted(ctx context.Context, tx db.Tx, node fleet.Node, action string, now time.Time) error {
	return bySystem(node.ID, now).recordNode(ctx, tx, nodeChange{
		event:  "fleet.node.adopted",
		action: action,
		node:   node,
	})
}
