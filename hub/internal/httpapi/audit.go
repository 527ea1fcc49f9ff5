package httpapi

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
)

// ListAudit lists the audit trail, the newest row first.
func (s *Server) ListAudit(ctx context.Context, r ListAuditRequestObject) (ListAuditResponseObject, error) {
	q := r.Params
	f, err := billingFilter(q.Cursor, q.Limit, q.From, q.To)
	if err != nil {
		return nil, err
	}
	items, next, err := page(q.Cursor, q.Limit, func(p db.Page) ([]event.AuditRow, error) {
		return s.Queries.Audit(ctx, principalOf(ctx), event.AuditQuery{
			OrgID: q.OrgID, ProjectID: q.ProjectID, ActorID: q.ActorID, Action: q.Action, ResourceType: q.ResourceType,
			ResourceID: q.ResourceID, CorrelationID: q.CorrelationID, Outcome: string(q.Outcome),
			From: f.From, To: f.To, Before: p.After, Limit: p.Limit,
		})
	}, func(row event.AuditRow) string { return row.ID })
	return ListAudit200JSONResponse{Items: views(items, auditView), NextCursor: next}, err
}

func auditView(r event.AuditRow) AuditRow {
	return AuditRow{
		ID: r.ID, At: r.At, Actor: AuditActor{Type: AuditActorType(r.Actor.Type), ID: r.Actor.ID}, Action: r.Action,
		Outcome: AuditOutcome(r.Outcome),
		Reason:  r.Reason, ResourceType: r.ResourceType, ResourceID: r.ResourceID, OrgID: r.OrgID, ProjectID: r.ProjectID,
		CorrelationID: r.CorrelationID, Before: r.Before, After: r.After,
	}
}
