package event

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
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
	var parts []string
	var args []any
	add := func(condition string, value any) {
		args = append(args, value)
		parts = append(parts, fmt.Sprintf(condition, len(args)))
	}
	for _, f := range []struct{ condition, value string }{
		{"org_id = $%d", q.OrgID},
		{"project_id = $%d", q.ProjectID},
		{"actor_id = $%d", q.ActorID},
		{"action = $%d", q.Action},
		{"resource_type = $%d", q.ResourceType},
		{"resource_id = $%d", q.ResourceID},
		{"correlation_id = $%d", q.CorrelationID},
		{"outcome = $%d", q.Outcome},
		{"id < $%d", q.Before},
	} {
		if f.value != "" {
			add(f.condition, f.value)
		}
	}
	if !q.From.IsZero() {
		add("at >= $%d", q.From)
	}
	if !q.To.IsZero() {
		add("at < $%d", q.To)
	}
	where := ""
	if len(parts) > 0 {
		where = "WHERE " + strings.Join(parts, " AND ")
	}
	limit := MaxPage
	if q.Limit > 0 {
		limit = min(q.Limit, MaxPage+1)
	}
	args = append(args, limit)
	return selectAudit(ctx, tx, fmt.Sprintf("%s ORDER BY id DESC LIMIT $%d", where, len(args)), args...)
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
