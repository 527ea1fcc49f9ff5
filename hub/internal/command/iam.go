package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
)

const (
	resourceOrg            = "org"
	resourceProject        = "project"
	resourceUser           = "user"
	resourceUserToken      = "user_token"
	resourceServiceAccount = "service_account"
)

// iamChange is the event and the audit row of one change of who there is.
type iamChange struct {
	// event is the event's type, action the permission that allowed it.
	event, action            string
	resourceType, resourceID string
	version                  int64
	orgID, projectID         string
	// before and after hold what may be told; never a key or a token.
	before, after any
}

func (m Meta) recordIAM(ctx context.Context, tx db.Tx, c iamChange) error {
	actor := m.Principal.Actor()
	data := map[string]any{}
	if actor.ID == "" {
		actor.Type = principal.System
	} else {
		data["requested_by"] = actor
	}
	if err := event.Append(ctx, tx, event.Event{
		Type: c.event, Subject: c.resourceID, ResourceVersion: c.version, OrgID: c.orgID, ProjectID: c.projectID,
		CorrelationID: m.CorrelationID, TraceID: m.TraceID, Data: data, At: m.Now,
	}); err != nil {
		return err
	}
	return event.Audit(ctx, tx, event.AuditRow{
		Actor: actor, Action: c.action, ResourceType: c.resourceType,
		ResourceID: c.resourceID,
		OrgID:      c.orgID, ProjectID: c.projectID, CorrelationID: m.CorrelationID, Before: c.before, After: c.after,
		At: m.Now,
	})
}
