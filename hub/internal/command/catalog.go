package command

import (
	"context"
	"errors"
	"maps"

	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	resourceAppVersion    = "app_version"
	resourcePublisher     = "publisher"
	resourceEntitlement   = "entitlement"
	resourcePublishIntent = "publish_intent"
	resourceArtifact      = "artifact"
)

// shipChange is the event and the audit row of one change of what is shipped: a version, an artifact, an entitlement.
type shipChange struct {
	// event is the event's type, action the permission that allowed it.
	event, action            string
	resourceType, resourceID string
	version                  int64
	orgID, projectID         string
	// data goes into the event; it holds no secret.
	data          map[string]any
	before, after any
}

func (m Meta) recordShipping(ctx context.Context, tx db.Tx, c shipChange) error {
	data := map[string]any{"requested_by": m.Principal.Actor()}
	maps.Copy(data, c.data)
	if err := event.Append(ctx, tx, event.Event{
		Type: c.event, Subject: c.resourceID, ResourceVersion: c.version, OrgID: c.orgID, ProjectID: c.projectID,
		CorrelationID: m.CorrelationID, TraceID: m.TraceID, Data: data, At: m.Now,
	}); err != nil {
		return err
	}
	return event.Audit(ctx, tx, event.AuditRow{
		Actor: m.Principal.Actor(), Action: c.action, ResourceType: c.resourceType,
		ResourceID: c.resourceID,
		OrgID:      c.orgID, ProjectID: c.projectID, CorrelationID: m.CorrelationID, Before: c.before, After: c.after,
		At: m.Now,
	})
}

func (m Meta) recordVersion(ctx context.Context, tx db.Tx, eventType, action, orgID string, before *catalog.Version,
	after catalog.Version,
) error {
	data := map[string]any{"app_slug": after.AppSlug, "version": after.Version, "to": after.Status}
	change := shipChange{
		event: eventType, action: action, resourceType: resourceAppVersion, resourceID: after.ID,
		version: after.ResourceVersion, orgID: orgID,
		data: data, after: map[string]any{
			"app_slug": after.AppSlug, "version": after.Version, "status": after.Status,
			"publisher_key_id": after.PublisherKeyID,
		},
	}
	if before != nil {
		data["from"] = before.Status
		change.before = map[string]any{"app_slug": before.AppSlug, "version": before.Version, "status": before.Status}
	}
	return m.recordShipping(ctx, tx, change)
}

// refusedDocument tells whoever hands in a signed document why it does not count. pointer is the document's place in
// the body; fields of a fault are places inside the document.
func refusedDocument(err error, code fault.Code, pointer string) error {
	if f, ok := errors.AsType[*fault.Error](err); ok {
		out := *f
		out.Fields = nil
		for _, field := range f.Fields {
			field.Pointer = pointer + "/payload" + field.Pointer
			out.Fields = append(out.Fields, field)
		}
		return &out
	}
	reason := protocol.RefusalOf(err)
	if reason == protocol.Nack_REASON_UNSPECIFIED {
		return err
	}
	return fault.New(fault.Unprocessable, code, "The signed document is refused.", err).WithField(pointer,
		reason.Text()).Permanent()
}
