package event

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/auditchain"
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
	newest := " ORDER BY id DESC LIMIT " + w.Arg(page(q.Limit))
	return selectAudit(ctx, tx, w.SQL()+newest, w.Args...)
}

func selectAudit(ctx context.Context, tx db.Tx, where string, args ...any) ([]AuditRow, error) {
	return db.Select(ctx, tx, func(row pgx.CollectableRow) (AuditRow, error) {
		var r AuditRow
		var before, after []byte
		err := row.Scan(&r.ID, &r.Actor.Type, &r.Actor.ID, &r.OnBehalfOf.Type, &r.OnBehalfOf.ID, &r.Action, &r.ResourceType,
			&r.ResourceID, &r.OrgID, &r.ProjectID, &r.CorrelationID, &r.SourceAddress, &r.Outcome, &r.Reason, &before, &after,
			&r.At, &r.Number, &r.PreviousHash, &r.Hash)
		if err == nil {
			r.Before, err = exact(before)
		}
		if err == nil {
			r.After, err = exact(after)
		}
		return r, err
	}, `
		SELECT id, actor_type, actor_id, on_behalf_of_type, on_behalf_of_id, action, resource_type, resource_id,
		       COALESCE(org_id::TEXT, ''), COALESCE(project_id::TEXT, ''), correlation_id, source_address, outcome, reason,
		       before, after, at, COALESCE(number, 0), COALESCE(encode(previous_hash, 'hex'), ''),
		       COALESCE(encode(hash, 'hex'), '')
		FROM audit_rows `+where, args...)
}

// exact reads a state; nil for none. A number that some readers of JSON would round becomes a string, so that every
// program hashes the same.
func exact(state []byte) (any, error) {
	if state == nil {
		return nil, nil
	}
	dec := json.NewDecoder(bytes.NewReader(state))
	dec.UseNumber()
	var tree any
	if err := dec.Decode(&tree); err != nil {
		return nil, fmt.Errorf("read a state: %w", err)
	}
	return exactTree(tree), nil
}

func exactTree(v any) any {
	switch v := v.(type) {
	case json.Number:
		if !auditchain.IsInteger(v) {
			return v.String()
		}
	case []any:
		for i := range v {
			v[i] = exactTree(v[i])
		}
	case map[string]any:
		for name := range v {
			v[name] = exactTree(v[name])
		}
	}
	return v
}
