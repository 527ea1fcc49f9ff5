package event

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
)

// Outcomes of an audited action.
const (
	Done   = "done"
	Denied = "denied"
	Failed = "failed"
)

// AuditRow says who did, or tried to do, what to which resource.
type AuditRow struct {
	// ID is made by Audit where it is empty.
	ID string
	// Actor has no ID for System and Anonymous.
	Actor principal.Actor
	// OnBehalfOf is who asked for what the actor did; zero where the actor itself did.
	OnBehalfOf principal.Actor
	// Action is the permission key or the operation, like apps.instance.create.
	Action                   string
	ResourceType, ResourceID string
	// OrgID and ProjectID are empty for platform resources.
	OrgID, ProjectID string
	CorrelationID    string
	// SourceAddress is the address that the request came from; empty where there was none.
	SourceAddress string
	// Outcome is Done where it is empty.
	Outcome string
	// Reason is what was said to be the reason of a change; the fault's code for what was denied or failed.
	Reason string
	// Before and After are the resource's states; nil where there was none.
	Before, After any
	At            time.Time
	// Number, PreviousHash and Hash are the row's place in the chain of its org; zero until the sequencer has been.
	Number             int64
	PreviousHash, Hash string
}

// Audit writes one row of the trail. Fields with the name of a secret are redacted.
func Audit(ctx context.Context, tx db.Tx, row AuditRow) error {
	if row.Actor.Type == "" || row.Action == "" || row.At.IsZero() {
		return fmt.Errorf("audit row %q: actor, action and time are required", row.Action)
	}
	before, err := state(row.Before)
	if err != nil {
		return fmt.Errorf("audit row %q: before: %w", row.Action, err)
	}
	after, err := state(row.After)
	if err != nil {
		return fmt.Errorf("audit row %q: after: %w", row.Action, err)
	}
	return tx.Queue(ctx, `
		INSERT INTO audit_rows (id, actor_type, actor_id, on_behalf_of_type, on_behalf_of_id, action, resource_type,
		resource_id, org_id, project_id, correlation_id, source_address, outcome, reason, before, after, at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17)`,
		cmp.Or(row.ID, db.NewID()), row.Actor.Type, row.Actor.ID, row.OnBehalfOf.Type, row.OnBehalfOf.ID, row.Action,
		row.ResourceType, row.ResourceID, db.OrNull(row.OrgID), db.OrNull(row.ProjectID), row.CorrelationID,
		row.SourceAddress, cmp.Or(row.Outcome, Done), row.Reason, before, after, row.At)
}

// AuditOf lists the trail of one resource, oldest first, at most limit rows (MaxPage).
func AuditOf(ctx context.Context, tx db.Tx, resourceType, resourceID string, limit int) ([]AuditRow, error) {
	return selectAudit(ctx, tx, `WHERE resource_type = $1 AND resource_id = $2 ORDER BY at, id LIMIT $3`, resourceType,
		resourceID, page(limit))
}

// state encodes a state of a resource; nil for none, which is NULL.
func state(v any) ([]byte, error) {
	if v == nil {
		return nil, nil
	}
	raw, err := telemetry.Redact(v)
	if err != nil {
		return nil, err
	}
	if len(raw) > maxStateBytes {
		return json.Marshal(map[string]int{"omitted_bytes": len(raw)})
	}
	return raw, nil
}
