package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
)

const (
	resourceNode      = "node"
	resourceJoinToken = "join_token"
)

// nodeChange is the event and the audit row of one change of a node.
type nodeChange struct {
	event  string
	action string
	// node is as it is after the change.
	node   fleet.Node
	reason string
}

func (m Meta) recordNode(ctx context.Context, tx db.Tx, c nodeChange) error {
	actor := m.Principal.Actor()
	if actor.ID == "" {
		actor = principal.Actor{Type: principal.Node, ID: c.node.ID}
	}
	data := map[string]any{
		"hostname": c.node.Hostname, "status": string(c.node.Status(m.Now)),
		"requested_by": actor,
	}
	if c.reason != "" {
		data["reason"] = c.reason
	}
	if err := event.Append(ctx, tx, event.Event{
		Type: c.event, Subject: c.node.ID, ResourceVersion: c.node.ResourceVersion, CorrelationID: m.CorrelationID,
		TraceID: m.TraceID, Data: data, At: m.Now,
	}); err != nil {
		return err
	}
	return event.Audit(ctx, tx, event.AuditRow{
		Actor: actor, Action: c.action, ResourceType: resourceNode, ResourceID: c.node.ID,
		CorrelationID: m.CorrelationID, Reason: c.reason, After: data, At: m.Now,
	})
}
