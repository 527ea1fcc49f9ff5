package ledger

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/rating"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const subjectColumns = `id, kind, org_id, project_id, coalesce(app_instance_id::text, ''), app_slug,
	coalesce(allocation_id::text, ''), node_id, sku,
	operating_mode, control_plane_scope, runtime_backend, correlation_id, cpu_millis, memory_bytes, accelerators,
	accelerator_slices, volume_bytes, opened_at, currency, lease_no,
	accrued_until, closed_at, settled_at, coalesce(final_incarnation, ''), coalesce(final_sequence, 0), failures,
	idle_since, idle_until`

func scanSubject(row pgx.CollectableRow) (subject, error) {
	var s subject
	err := row.Scan(&s.ID, &s.Kind, &s.OrgID, &s.ProjectID, &s.AppInstanceID, &s.AppSlug, &s.AllocationID, &s.NodeID,
		&s.SKU,
		&s.OperatingMode, &s.ControlPlaneScope, &s.RuntimeBackend, &s.CorrelationID, &s.CPUMillis, &s.MemoryBytes,
		&s.Accelerators, &s.AcceleratorSlices, &s.VolumeBytes, &s.OpenedAt, &s.currency, &s.leaseNo,
		&s.accruedUntil, (*zeronull.Timestamptz)(&s.closedAt), (*zeronull.Timestamptz)(&s.settledAt), &s.final.Incarnation,
		&s.final.Sequence, &s.failures, (*zeronull.Timestamptz)(&s.idle.From), (*zeronull.Timestamptz)(&s.idle.To))
	if s.idle.From.IsZero() {
		s.idle = rating.Interval{}
	}
	return s, err
}

// keysOf are the subjects' nodes and ids: what keys of their rows begin with.
func keysOf(subjects []*subject) (nodes, ids []pgtype.UUID) {
	nodes, ids = make([]pgtype.UUID, len(subjects)), make([]pgtype.UUID, len(subjects))
	for i, s := range subjects {
		nodes[i], ids[i] = id(s.NodeID), s.uuid()
	}
	return nodes, ids
}

func insertSubject(ctx context.Context, tx db.Tx, s Subject) (made bool, err error) {
	var renewAt *time.Time
	if s.Kind == Member {
		// A member needs a lease from the first moment on, whether or not anything asks for it.
		renewAt = &s.OpenedAt
	}
	tag, err := tx.Exec(ctx,
		`INSERT INTO subjects (id, kind, org_id, project_id, app_instance_id, app_slug, allocation_id, node_id, sku,
			operating_mode, control_plane_scope, runtime_backend, correlation_id, cpu_millis, memory_bytes, opened_at, currency,
			lease_no, accrued_until, renew_at, accelerators, volume_bytes, accelerator_slices)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, '', 0, $16, $17, $18, $19, $20)
		ON CONFLICT (id) DO NOTHING`,
		s.ID, s.Kind, s.OrgID, s.ProjectID, db.OrNull(s.AppInstanceID), s.AppSlug, db.OrNull(s.AllocationID), s.NodeID, s.SKU,
		s.OperatingMode, s.ControlPlaneScope, s.RuntimeBackend, s.CorrelationID, s.CPUMillis, s.MemoryBytes, s.OpenedAt,
		renewAt, s.Accelerators, s.VolumeBytes, s.AcceleratorSlices)
	return tag.RowsAffected() == 1, err
}

func lockSubject(ctx context.Context, tx db.Tx, id string) (subject, error) {
	s, err := db.SelectOne(ctx, tx, scanSubject,
		`SELECT `+subjectColumns+` FROM subjects WHERE id = $1 FOR UPDATE`, id)
	if db.IsNoRows(err) {
		return s, fault.New(fault.NotFound, codeSubjectNotFound, "Nothing of this id is billed.", err)
	}
	return s, err
}

// lockMembers locks the members that are on the given nodes, in one order; ids and nodes are pairs.
func lockMembers(ctx context.Context, tx db.Tx, nodes, ids []string) (map[string]*subject, error) {
	return subjectMap(db.Select(ctx, tx, scanSubject, `SELECT `+subjectColumns+` FROM subjects
		JOIN unnest($1::uuid[], $2::uuid[]) AS x(member, node) ON id = x.member AND node_id = x.node
		WHERE kind = 'member' ORDER BY id FOR UPDATE OF subjects`, uuids(ids), uuids(nodes)))
}

func subjectsByID(ctx context.Context, tx db.Tx, ids []string) (map[string]*subject, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	return subjectMap(db.Select(ctx, tx, scanSubject, `SELECT `+subjectColumns+` FROM subjects
		WHERE id = ANY($1::uuid[])`, uuids(ids)))
}

func subjectMap(rows []subject, err error) (map[string]*subject, error) {
	out := make(map[string]*subject, len(rows))
	for i := range rows {
		out[rows[i].ID] = &rows[i]
	}
	return out, err
}

// orFirst is the id before all others, for a listing from its beginning.
func orFirst(id string) string {
	if id == "" {
		return uuid.Nil.String()
	}
	return id
}

// retryRenewals makes those members of an org due that were not renewed when they last were.
func retryRenewals(ctx context.Context, tx db.Tx, orgID string, now time.Time) error {
	return tx.Queue(ctx,
		`UPDATE subjects SET renew_at = $2, retry_at = NULL WHERE org_id = $1 AND failures > 0 AND closed_at IS NULL
			AND renew_at > $2`, orgID, now)
}

// setRenewal changes when a member is due; the zero time is never.
func setRenewal(ctx context.Context, tx db.Tx, id string, at time.Time) error {
	return tx.Queue(ctx, `UPDATE subjects SET renew_at = $2 WHERE id = $1`, id, db.OrNull(at))
}

// noteIdle writes only what says something new: a report comes every half minute.
func noteIdle(ctx context.Context, tx db.Tx, nodeID string, ids []pgtype.UUID, idle []bool, now,
	before time.Time,
) error {
	return tx.Queue(ctx, `UPDATE subjects SET idle_since = CASE WHEN x.idle THEN coalesce(idle_since, $4::timestamptz) END,
			idle_until = CASE WHEN x.idle THEN $4::timestamptz ELSE idle_until END
		FROM unnest($1::uuid[], $2::bool[]) AS x(id, idle) WHERE subjects.id = x.id AND subjects.node_id = $3
		AND subjects.closed_at IS NULL
			AND (x.idle AND (idle_since IS NULL OR idle_until < $5) OR NOT x.idle AND idle_since IS NOT NULL)`, ids, idle,
		nodeID, now, before)
}

func setAside(ctx context.Context, tx db.Tx, id string, failures int64, until time.Time) error {
	return tx.Queue(ctx,
		`UPDATE subjects SET failures = $2, retry_at = $3::timestamptz, renew_at = CASE WHEN renew_at IS NULL THEN NULL
			ELSE $3::timestamptz END WHERE id = $1`,
		id, failures, until)
}

func setFinals(ctx context.Context, tx db.Tx, finals map[string]billing.Final) error {
	if len(finals) == 0 {
		return nil
	}
	columns := columnsOf(slices.Sorted(maps.Keys(finals)), func(memberID string) []any {
		return []any{id(memberID), finals[memberID].Incarnation, finals[memberID].Sequence}
	})
	return tx.Queue(ctx, `UPDATE subjects SET final_incarnation = x.incarnation, final_sequence = x.number
		FROM unnest($1::uuid[], $2::text[], $3::int8[]) AS x(id, incarnation, number) WHERE subjects.id = x.id`, columns...)
}

func setAccrued(ctx context.Context, tx db.Tx, s subject) error {
	return tx.Queue(ctx,
		`UPDATE subjects SET accrued_until = $2, currency = $3, failures = 0, retry_at = NULL WHERE id = $1`, s.ID,
		s.accruedUntil, s.currency)
}

func setLeased(ctx context.Context, tx db.Tx, s subject, renewAt time.Time) error {
	// The new lease's cap makes up for all that is in suspense by now.
	if err := tx.Queue(ctx, `UPDATE suspense_totals SET leased_quantity = quantity WHERE node_id = $1
		AND subject_id = $2`, s.NodeID, s.ID); err != nil {
		return err
	}
	return tx.Queue(ctx,
		`UPDATE subjects SET lease_no = $2, renew_at = $3, currency = $4, failures = 0, retry_at = NULL WHERE id = $1`, s.ID,
		s.leaseNo, renewAt, s.currency)
}
