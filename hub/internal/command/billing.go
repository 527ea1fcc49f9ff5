package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
)

const (
	resourcePrice   = "price"
	resourcePosting = "posting"
)

// billingChange is the event and the audit row of one change that an admin makes to prices or wallets.
type billingChange struct {
	event, action            string
	resourceType, resourceID string
	orgID                    string
	data                     map[string]any
}

func (m Meta) recordBilling(ctx context.Context, tx db.Tx, c billingChange) error {
	if err := event.Append(ctx, tx, event.Event{
		Type: c.event, Subject: c.resourceID, ResourceVersion: 1, OrgID: c.orgID, CorrelationID: m.CorrelationID,
		TraceID: m.TraceID, Data: c.data, At: m.Now,
	}); err != nil {
		return err
	}
	return event.Audit(ctx, tx, event.AuditRow{
		Actor: m.Principal.Actor(), Action: c.action, ResourceType: c.resourceType,
		ResourceID: c.resourceID,
		OrgID:      c.orgID, CorrelationID: m.CorrelationID, After: c.data, At: m.Now,
	})
}
