package change

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
)

// RecordNode writes the event and the audit row of a change of a node, which is given as it is after the change. Where
// no caller is known, the node itself made the change. before is its earlier status; empty where it was not there.
func RecordNode(ctx context.Context, tx db.Tx, by By, eventType, action, before string, n fleet.Node,
	reason string,
) error {
	if by.ID == "" {
		by.Actor = principal.Actor{Type: principal.Node, ID: n.ID}
	}
	data := map[string]any{"hostname": n.Hostname, "status": string(n.Status(by.Now)), "requested_by": by.Actor}
	if reason != "" {
		data["reason"] = reason
	}
	e := Entry{
		Event:        eventType,
		Action:       action,
		ResourceType: Node,
		ResourceID:   n.ID,
		Version:      n.ResourceVersion,
		Reason:       reason,
		Data:         data,
		After:        data,
	}
	if before != "" {
		e.Before = map[string]any{"hostname": n.Hostname, "status": before}
	}
	return Record(ctx, tx, by, e)
}
