package event

import (
	"context"
	"encoding/json"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// AuditQuery narrows a listing of the trail; an empty field lets everything through. The caller has checked that all of
// OrgID and ProjectID may be read.
type AuditQuery struct {
	OrgID, ProjectID         string
	ActorID                  string
	Action                   string
	ResourceType, ResourceID string
	CorrelationID            string
	Outcome                  string
	// From and To bound when it happened: [From, To).
	From, To time.Time
	// Before is the id of the last row of the page before.
	Before string
	// Limit is at most MaxPage and one more, which tells whether there is another page; 0 means MaxPage.
	Limit int
}

// ListAudit lists the trail, the newest row first.
func ListAudit(ctx context.Context, tx db.Tx, q AuditQuery) ([]AuditRow, error) {
	var w db.Where
	w.Compare("org_id =", q.OrgID)
	w.Compare("project_id =", q.ProjectID)
	w.Compare("actor_id =", q.ActorID)
	w.Compare("action =", q.Action)
	w.Compare("resource_type =", q.ResourceType)
	w.Compare("resource_id =", q.ResourceID)
	w.Compare("correlation_id =", q.CorrelationID)
	w.Compare("outcome =", q.Outcome)
	w.Compare("id <", q.Before)
	w.Between("at", q.From, q.To)
	rows := MaxPage
	if q.Limit > 0 {
		rows = min(q.Limit, MaxPage+1)
	}
	newest := " ORDER BY id DESC LIMIT " + w.Arg(rows)
	return selectAudit(ctx, tx, w.SQL()+newest, w.Args...)
}

func selectAudit(ctx context.Context, tx db.Tx, where string, args ...any) ([]AuditRow, error) {
	return db.Select(ctx, tx, func(row pgx.CollectableRow) (AuditRow, error) {
		var r AuditRow
		var before, after []byte
		err := row.Scan(&r.ID, &r.Actor.Type, &r.Actor.ID, &r.Action, &r.ResourceType, &r.ResourceID, &r.OrgID, &r.ProjectID,
			&r.CorrelationID, &r.Outcome, &r.Reason, &before, &after, &r.At)
		if before != nil {
			r.Before = json.RawMessage(before)
		}
		if after != nil {
			r.After = json.RawMessage(after)
		}
		return r, err
	}, `
		SELECT id, actor_type, actor_id, action, resource_type, resource_id, COALESCE(org_id::TEXT, ''),
		COALESCE(project_id::TEXT, ''),
		       correlation_id, outcome, reason, before, after, at
		FROM audit_rows `+where, args...)
}
