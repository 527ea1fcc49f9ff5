package event

import (
	"context"
	"encoding/json"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

const eventColumns = `id, type, subject, resource_version, COALESCE(org_id::TEXT, ''), COALESCE(project_id::TEXT, ''),
	correlation_id, traceparent, data, at, COALESCE(pos, 0)`

func scanEvent(row pgx.CollectableRow) (Event, error) {
	var e Event
	var data []byte
	err := row.Scan(&e.ID, &e.Type, &e.Subject, &e.ResourceVersion, &e.OrgID, &e.ProjectID, &e.CorrelationID,
		&e.Traceparent, &data, &e.At, &e.Pos)
	e.Data = json.RawMessage(data)
	return e, err
}

// lease is the sequencer's row: who numbers events until when, and the last number given.
type lease struct {
	holder  string
	until   time.Time
	lastPos int64
}

// selectLease locks the row, and makes it before: what is not there locks nobody out.
func selectLease(ctx context.Context, tx db.Tx) (lease, error) {
	l, err := lockLease(ctx, tx)
	if !db.IsNoRows(err) {
		return l, err
	}
	if _, err := tx.Exec(ctx, `INSERT INTO event_sequencer (name, holder, lease_until, last_pos)
		VALUES ('events', '', $1, 0) ON CONFLICT (name) DO NOTHING`, l.until); err != nil {
		return lease{}, err
	}
	return lockLease(ctx, tx)
}

// underLease locks the lease row and reads what it guards in one round trip, the lock first.
func underLease[T any](ctx context.Context, tx db.Tx, list func(tx db.Tx) ([]T, error)) (l lease, out []T, err error) {
	err = db.Together(ctx, tx, func(tx db.Tx) (err error) {
		l, err = lockLease(ctx, tx)
		return err
	}, func(tx db.Tx) (err error) {
		out, err = list(tx)
		return err
	})
	if !db.IsNoRows(err) {
		return l, out, err
	}
	if l, err = selectLease(ctx, tx); err == nil {
		out, err = list(tx)
	}
	return l, out, err
}

func lockLease(ctx context.Context, tx db.Tx) (l lease, err error) {
	err = tx.QueryRow(ctx, `SELECT holder, lease_until, last_pos FROM event_sequencer WHERE name = 'events' FOR UPDATE`).
		Scan(&l.holder, &l.until, &l.lastPos)
	return l, err
}

func saveLease(ctx context.Context, tx db.Tx, l lease) error {
	return tx.Queue(ctx, `
		INSERT INTO event_sequencer (name, holder, lease_until, last_pos) VALUES ('events', $1, $2, $3)
		ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, lease_until = excluded.lease_until, last_pos =
		excluded.last_pos`,
		l.holder, l.until, l.lastPos)
}
