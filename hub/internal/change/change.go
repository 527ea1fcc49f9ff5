// Package change completes changes inside the transaction that makes them: the event and the audit row of each, the
// findings, and what a change of an instance means for the other slices (intents of nodes, capacity, bills). Commands,
// node reports, recovery and periodic passes share it. It starts no change itself and checks no caller.
package change

import (
	"cmp"
	"context"
	"maps"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
)

// The resource types of the changes that several packages make.
const (
	Node       = "node"
	Instance   = "app_instance"
	Allocation = "allocation"
	Volume     = "volume"
	Snapshot   = "volume_snapshot"
	Member     = "member"
	Webhook    = "webhook"
	Attachment = "attachment"
)

// By says who makes a change, when, and how it is traced.
type By struct {
	principal.Actor
	// CorrelationID is the request id; events, audit rows and the node's reports repeat it.
	CorrelationID string
	// Traceparent is the W3C trace context of what asked for it; empty without a trace.
	Traceparent string
	// SourceAddress is where the request came from; empty where the hub or a node acts by itself.
	SourceAddress string
	Now           time.Time
}

// BySystem is a change that the hub makes by a rule of its own.
func BySystem(correlationID string, now time.Time) By {
	return By{Actor: principal.Actor{Type: principal.System}, CorrelationID: correlationID, Now: now}
}

// ByNode is a change that follows from what a node sent.
func ByNode(nodeID, correlationID string, now time.Time) By {
	return By{Actor: principal.Actor{Type: principal.Node, ID: nodeID}, CorrelationID: correlationID, Now: now}
}

// Entry is the event and the audit row of one change.
type Entry struct {
	// Event is the event's type, Action the permission or rule that allowed the change.
	Event, Action            string
	ResourceType, ResourceID string
	// Version is the resource's after the change; 0 is 1, of a resource that does not change.
	Version          int64
	OrgID, ProjectID string
	Reason           string
	// RequestedBy joins the event's data. Where it is zero, it is who makes the change, and absent for the hub itself. A
	// node makes the change on behalf of it.
	RequestedBy principal.Actor
	// Data goes into the event. Like Before and After it holds no secret.
	Data          map[string]any
	Before, After any
}

// Record writes the event and the audit row.
func Record(ctx context.Context, tx db.Tx, by By, e Entry) error {
	if err := Append(ctx, tx, by, e); err != nil {
		return err
	}
	return Audit(ctx, tx, by, e)
}

// Append writes the event alone.
func Append(ctx context.Context, tx db.Tx, by By, e Entry) error {
	data := map[string]any{}
	maps.Copy(data, e.Data)
	switch {
	case e.RequestedBy != principal.Actor{}:
		data["requested_by"] = e.RequestedBy
	case by.ID != "":
		data["requested_by"] = by.Actor
	}
	return event.Append(ctx, tx, event.Event{
		Type:            e.Event,
		Subject:         e.ResourceID,
		ResourceVersion: max(e.Version, 1),
		OrgID:           e.OrgID,
		ProjectID:       e.ProjectID,
		CorrelationID:   by.CorrelationID,
		Traceparent:     by.Traceparent,
		Data:            data,
		At:              by.Now,
	})
}

// Audit writes the audit row alone: for a change that has no event, or several.
func Audit(ctx context.Context, tx db.Tx, by By, e Entry) error {
	var onBehalfOf principal.Actor
	if by.Type == principal.Node {
		onBehalfOf = e.RequestedBy
	}
	return event.Audit(ctx, tx, event.AuditRow{
		Actor:         principal.Actor{Type: cmp.Or(by.Type, principal.System), ID: by.ID},
		OnBehalfOf:    onBehalfOf,
		Action:        e.Action,
		ResourceType:  e.ResourceType,
		ResourceID:    e.ResourceID,
		OrgID:         e.OrgID,
		ProjectID:     e.ProjectID,
		CorrelationID: by.CorrelationID,
		SourceAddress: by.SourceAddress,
		Reason:        e.Reason,
		Before:        e.Before,
		After:         e.After,
		At:            by.Now,
	})
}
