package event

import (
	"context"
	"encoding/json"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

func insertEvent(ctx context.Context, tx db.Tx, e Event, data json.RawMessage) error {
	return tx.Queue(ctx, `
		INSERT INTO events (id, type, subject, resource_version, org_id, project_id, correlation_id, trace_id, data, at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)`,
		e.ID, e.Type, e.Subject, e.ResourceVersion, null(e.OrgID), null(e.ProjectID), e.CorrelationID, e.TraceID, data, e.At)
}

const eventColumns = `id, type, subject, resource_version, COALESCE(org_id::TEXT, ''), COALESCE(project_id::TEXT, ''),
	correlation_id, trace_id, data, at, COALESCE(pos, 0)`

func scanEvent(row pgx.CollectableRow) (Event, error) {
	var e Event
	var data []byte
	err := row.Scan(&e.ID, &e.Type, &e.Subject, &e.ResourceVersion, &e.OrgID, &e.ProjectID, &e.CorrelationID, &e.TraceID,
		&data, &e.At, &e.Pos)
	e.Data = json.RawMessage(data)
	return e, err
}

func collect(ctx context.Context, tx db.Tx, sql string, args ...any) ([]Event, error) {
	rows, err := tx.Query(ctx, sql, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scanEvent)
}

func selectBySubject(ctx context.Context, tx db.Tx, orgID, subject string, afterVersion int64, afterID string,
	limit int,
) ([]Event, error) {
	return collect(ctx, tx, `
		SELECT `+eventColumns+` FROM events
		WHERE subject = $1 AND ($2::UUID IS NULL OR org_id = $2::UUID)
		  AND (resource_version > $3 OR (resource_version = $3 AND id > $4::UUID))
		ORDER BY resource_version, id
		LIMIT $5`, subject, null(orgID), afterVersion, null(afterID), limit)
}

func selectAfterPos(ctx context.Context, tx db.Tx, orgID string, pos int64, limit int) ([]Event, error) {
	return collect(ctx, tx, `
		SELECT `+eventColumns+` FROM events
		WHERE pos > $1 AND ($2::UUID IS NULL OR org_id = $2::UUID)
		ORDER BY pos
		LIMIT $3`, pos, null(orgID), limit)
}

func selectUnsequenced(ctx context.Context, tx db.Tx, limit int) ([]Event, error) {
	return collect(ctx, tx, `SELECT `+eventColumns+` FROM events WHERE pos IS NULL ORDER BY id LIMIT $1`, limit)
}

func setPositions(ctx context.Context, tx db.Tx, ids []string, positions []int64) error {
	return tx.Queue(ctx, `
		UPDATE events SET pos = n.pos
		FROM (SELECT unnest($1::UUID[]) AS id, unnest($2::INT8[]) AS pos) AS n
		WHERE events.id = n.id`, ids, positions)
}

// lease is the sequencer's row: who numbers events until when, and the last number given.
type lease struct {
	holder  string
	until   time.Time
	lastPos int64
}

func selectLease(ctx context.Context, tx db.Tx) (lease, error) {
	var l lease
	err := tx.QueryRow(ctx, `SELECT holder, lease_until, last_pos FROM event_sequencer WHERE name = 'events' FOR UPDATE`).
		Scan(&l.holder, &l.until, &l.lastPos)
	if db.IsNoRows(err) {
		return lease{}, nil
	}
	return l, err
}

func saveLease(ctx context.Context, tx db.Tx, l lease) error {
	return tx.Queue(ctx, `
		INSERT INTO event_sequencer (name, holder, lease_until, last_pos) VALUES ('events', $1, $2, $3)
		ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, lease_until = excluded.lease_until, last_pos =
		excluded.last_pos`,
		l.holder, l.until, l.lastPos)
}

func insertAudit(ctx context.Context, tx db.Tx, row AuditRow, before, after json.RawMessage) error {
	return tx.Queue(ctx, `
		INSERT INTO audit_rows (id, actor_type, actor_id, action, resource_type, resource_id, org_id, project_id,
		correlation_id, outcome, reason, before, after, at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)`,
		row.ID, row.Actor.Type, row.Actor.ID, row.Action, row.ResourceType, row.ResourceID, null(row.OrgID),
		null(row.ProjectID),
		row.CorrelationID, row.Outcome, row.Reason, nullJSON(before), nullJSON(after), row.At)
}

func null(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

func nullJSON(raw json.RawMessage) any {
	if raw == nil {
		return nil
	}
	return raw
}
