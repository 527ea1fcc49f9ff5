package ledger

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// ---- subjects

const subjectColumns = `id, kind, org_id, project_id, coalesce(app_instance_id::text, ''), app_slug, coalesce(allocation_id::text, ''), node_id, sku,
	operating_mode, control_plane_scope, runtime_backend, correlation_id, cpu_millis, memory_bytes, opened_at, currency, lease_no,
	accrued_until, closed_at, settled_at, coalesce(final_incarnation, ''), coalesce(final_sequence, 0)`

func scanSubject(row pgx.Row) (subject, error) {
	var s subject
	var closed, settled *time.Time
	err := row.Scan(&s.ID, &s.Kind, &s.OrgID, &s.ProjectID, &s.AppInstanceID, &s.AppSlug, &s.AllocationID, &s.NodeID, &s.SKU,
		&s.OperatingMode, &s.ControlPlaneScope, &s.RuntimeBackend, &s.CorrelationID, &s.CPUMillis, &s.MemoryBytes, &s.OpenedAt, &s.currency, &s.leaseNo,
		&s.accruedUntil, &closed, &settled, &s.final.incarnation, &s.final.sequence)
	if closed != nil {
		s.closedAt = *closed
	}
	if settled != nil {
		s.settledAt = *settled
	}
	return s, err
}

// collect reads all rows of a query.
func collect[T any](ctx context.Context, tx db.Tx, scan func(pgx.Row) (T, error), sql string, args ...any) ([]T, error) {
	rows, err := tx.Query(ctx, sql, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (T, error) { return scan(row) })
}

func insertSubject(ctx context.Context, tx db.Tx, s Subject) (made bool, err error) {
	tag, err := tx.Exec(ctx, `INSERT INTO subjects (id, kind, org_id, project_id, app_instance_id, app_slug, allocation_id, node_id, sku,
			operating_mode, control_plane_scope, runtime_backend, correlation_id, cpu_millis, memory_bytes, opened_at, currency, lease_no, accrued_until)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, '', 0, $16) ON CONFLICT (id) DO NOTHING`,
		s.ID, s.Kind, s.OrgID, s.ProjectID, orNull(s.AppInstanceID), s.AppSlug, orNull(s.AllocationID), s.NodeID, s.SKU,
		s.OperatingMode, s.ControlPlaneScope, s.RuntimeBackend, s.CorrelationID, s.CPUMillis, s.MemoryBytes, s.OpenedAt)
	return tag.RowsAffected() == 1, err
}

// orNull keeps "no id" out of id columns.
func orNull(id string) any {
	if id == "" {
		return nil
	}
	return id
}

func lockSubject(ctx context.Context, tx db.Tx, id string) (subject, error) {
	s, err := scanSubject(tx.QueryRow(ctx, `SELECT `+subjectColumns+` FROM subjects WHERE id = $1 FOR UPDATE`, id))
	if db.IsNoRows(err) {
		return s, fault.New(fault.NotFound, "subject_not_found", "Nothing of this id is billed.", err)
	}
	return s, err
}

func subjectsByID(ctx context.Context, tx db.Tx, ids []string) (map[string]*subject, error) {
	rows, err := collect(ctx, tx, scanSubject, `SELECT `+subjectColumns+` FROM subjects WHERE id = ANY($1::uuid[])`, ids)
	out := make(map[string]*subject, len(rows))
	for i := range rows {
		out[rows[i].ID] = &rows[i]
	}
	return out, err
}

func unsettledSubjects(ctx context.Context, tx db.Tx, nodeIDs []string) ([]subject, error) {
	return collect(ctx, tx, scanSubject, `SELECT `+subjectColumns+` FROM subjects
		WHERE node_id = ANY($1::uuid[]) AND settled_at IS NULL AND closed_at IS NOT NULL AND final_incarnation IS NOT NULL ORDER BY id`, nodeIDs)
}

func countOwing(ctx context.Context, tx db.Tx, nodeID string) (n int, err error) {
	err = tx.QueryRow(ctx, `SELECT count(*) FROM subjects WHERE node_id = $1 AND kind = 'member' AND settled_at IS NULL`, nodeID).Scan(&n)
	return n, err
}

func dueAllocations(ctx context.Context, tx db.Tx, now time.Time, limit int) ([]subject, error) {
	return collect(ctx, tx, scanSubject, `SELECT `+subjectColumns+` FROM subjects
		WHERE kind = 'allocation' AND closed_at IS NULL AND accrued_until < $1 ORDER BY accrued_until, id LIMIT $2`, now, limit)
}

func scanID(row pgx.Row) (id string, err error) {
	err = row.Scan(&id)
	return id, err
}

func dueSubjects(ctx context.Context, tx db.Tx, except []string, now time.Time, limit int) ([]Due, error) {
	return collect(ctx, tx, func(row pgx.Row) (d Due, err error) {
		err = row.Scan(&d.SubjectID, &d.NodeID, &d.AppSlug)
		return d, err
	},
		`SELECT id, node_id, app_slug FROM subjects WHERE closed_at IS NULL AND renew_at <= $1 AND node_id <> ALL($3::uuid[]) ORDER BY renew_at, id LIMIT $2`,
		now, limit, append([]string{}, except...))
}

func staleSubjects(ctx context.Context, tx db.Tx, before time.Time, limit int) ([]string, error) {
	return collect(ctx, tx, scanID,
		`SELECT s.id FROM subjects s JOIN leases l ON l.subject_id = s.id AND l.lease_no = s.lease_no
		WHERE s.settled_at IS NULL AND s.closed_at < $1 AND l.expires_at < $1 ORDER BY s.id LIMIT $2`, before, limit)
}

func setClosed(ctx context.Context, tx db.Tx, s subject) error {
	return tx.Later(ctx, `UPDATE subjects SET closed_at = $2 WHERE id = $1`, s.ID, s.closedAt)
}

func setSettled(ctx context.Context, tx db.Tx, id string, now time.Time) error {
	return tx.Later(ctx, `UPDATE subjects SET settled_at = $2 WHERE id = $1`, id, now)
}

func setFinals(ctx context.Context, tx db.Tx, finals map[string]finalMark) error {
	if len(finals) == 0 {
		return nil
	}
	var ids, incarnations []string
	var numbers []int64
	for _, id := range slices.Sorted(maps.Keys(finals)) {
		ids, incarnations, numbers = append(ids, id), append(incarnations, finals[id].incarnation), append(numbers, finals[id].sequence)
	}
	return tx.Later(ctx, `UPDATE subjects SET final_incarnation = x.incarnation, final_sequence = x.number
		FROM unnest($1::uuid[], $2::text[], $3::int8[]) AS x(id, incarnation, number) WHERE subjects.id = x.id`, uuids(ids), incarnations, numbers)
}

func setAccrued(ctx context.Context, tx db.Tx, s subject) error {
	return tx.Later(ctx, `UPDATE subjects SET accrued_until = $2, currency = $3 WHERE id = $1`, s.ID, s.accruedUntil, s.currency)
}

func setLeased(ctx context.Context, tx db.Tx, s subject, renewAt time.Time) error {
	return tx.Later(ctx, `UPDATE subjects SET lease_no = $2, renew_at = $3, currency = $4 WHERE id = $1`, s.ID, s.leaseNo, renewAt, s.currency)
}

// ---- prices

func scanPrice(row pgx.Row) (Price, error) {
	var p Price
	err := row.Scan(&p.ID, &p.Meter, &p.AppSlug, &p.SKU, &p.Currency, &p.Nanos, &p.Per, &p.PerQuantity, &p.HostBasisPoints, &p.From, &p.CreatedAt)
	return p, err
}

const priceColumns = `id, meter, app_slug, sku, currency, nanos, per, per_quantity, host_basis_points, from_at, created_at`

func insertPrice(ctx context.Context, tx db.Tx, p Price) (made bool, err error) {
	tag, err := tx.Exec(ctx, `INSERT INTO prices (`+priceColumns+`) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
		ON CONFLICT (meter, app_slug, sku, currency, from_at) DO NOTHING`,
		p.ID, p.Meter, p.AppSlug, p.SKU, p.Currency, p.Nanos, p.Per, p.PerQuantity, p.HostBasisPoints, p.From, p.CreatedAt)
	return tag.RowsAffected() == 1, err
}

func pricesOf(ctx context.Context, tx db.Tx, meters []string) ([]Price, error) {
	return collect(ctx, tx, scanPrice, `SELECT `+priceColumns+` FROM prices WHERE meter = ANY($1::text[]) ORDER BY from_at, id`, meters)
}

// ---- wallets and holds

func walletBalance(ctx context.Context, tx db.Tx, orgID, currency string) (nanos int64, err error) {
	err = tx.QueryRow(ctx, `SELECT balance_nanos FROM wallets WHERE org_id = $1 AND currency = $2 FOR UPDATE`, orgID, currency).Scan(&nanos)
	if db.IsNoRows(err) {
		return 0, nil
	}
	return nanos, err
}

// drawWallet takes from a wallet what it covers; nanos is below zero.
func drawWallet(ctx context.Context, tx db.Tx, orgID, currency string, nanos int64) (covered bool, err error) {
	tag, err := tx.Exec(ctx, `UPDATE wallets SET balance_nanos = balance_nanos + $3 WHERE org_id = $1 AND currency = $2 AND balance_nanos >= -$3::int8`,
		orgID, currency, nanos)
	return tag.RowsAffected() == 1, err
}

func upsertWallet(ctx context.Context, tx db.Tx, orgID, currency string, nanos int64, now time.Time) error {
	return tx.Later(ctx, `INSERT INTO wallets (org_id, currency, balance_nanos, created_at) VALUES ($1, $2, $3, $4)
		ON CONFLICT (org_id, currency) DO UPDATE SET balance_nanos = excluded.balance_nanos`, orgID, currency, nanos, now)
}

func oldestWallet(ctx context.Context, tx db.Tx, orgID string) (currency string, err error) {
	err = tx.QueryRow(ctx, `SELECT currency FROM wallets WHERE org_id = $1 ORDER BY created_at, currency LIMIT 1`, orgID).Scan(&currency)
	if db.IsNoRows(err) {
		return "", nil
	}
	return currency, err
}

func balances(ctx context.Context, tx db.Tx, orgID string) ([]Balance, error) {
	return collect(ctx, tx, func(row pgx.Row) (b Balance, err error) {
		err = row.Scan(&b.Currency, &b.AvailableNanos, &b.HeldNanos)
		return b, err
	}, `SELECT w.currency, w.balance_nanos, coalesce((SELECT sum(h.placed_nanos - h.posted_nanos - h.released_nanos) FROM holds h
			WHERE h.org_id = w.org_id AND h.currency = w.currency), 0)::int8
		FROM wallets w WHERE w.org_id = $1 ORDER BY w.currency`, orgID)
}

func scanHold(row pgx.Row) (hold, error) {
	var h hold
	err := row.Scan(&h.id, &h.subjectID, &h.orgID, &h.currency, &h.placed, &h.posted, &h.released)
	return h, err
}

const holdColumns = `id, subject_id, org_id, currency, placed_nanos, posted_nanos, released_nanos`

func holdOf(ctx context.Context, tx db.Tx, subjectID string) (hold, bool, error) {
	h, err := scanHold(tx.QueryRow(ctx, `SELECT `+holdColumns+` FROM holds WHERE subject_id = $1 FOR UPDATE`, subjectID))
	if db.IsNoRows(err) {
		return hold{}, false, nil
	}
	return h, err == nil, err
}

func holdsOf(ctx context.Context, tx db.Tx, subjectIDs []string) (map[string]hold, error) {
	rows, err := collect(ctx, tx, scanHold, `SELECT `+holdColumns+` FROM holds WHERE subject_id = ANY($1::uuid[])`, subjectIDs)
	out := make(map[string]hold, len(rows))
	for _, h := range rows {
		out[h.subjectID] = h
	}
	return out, err
}

func insertHold(ctx context.Context, tx db.Tx, h hold) error {
	return tx.Later(ctx, `INSERT INTO holds (`+holdColumns+`) VALUES ($1, $2, $3, $4, $5, $6, $7)`,
		h.id, h.subjectID, h.orgID, h.currency, h.placed, h.posted, h.released)
}

func updateHold(ctx context.Context, tx db.Tx, h hold) error {
	return tx.Later(ctx, `UPDATE holds SET currency = $2, placed_nanos = $3, posted_nanos = $4, released_nanos = $5 WHERE id = $1`,
		h.id, h.currency, h.placed, h.posted, h.released)
}

// ---- leases

func scanLease(row pgx.Row) (lease, error) {
	var l lease
	var prices []byte
	if err := row.Scan(&l.subjectID, &l.no, &l.nodeID, &l.holdID, &l.currency, &l.cap, &l.issuedAt, &l.expiresAt, &l.endPolicy, &prices); err != nil {
		return l, err
	}
	if err := json.Unmarshal(prices, &l.prices); err != nil {
		return l, fmt.Errorf("prices of lease %d of %s: %w", l.no, l.subjectID, err)
	}
	return l, nil
}

const leaseColumns = `subject_id, lease_no, node_id, hold_id, currency, cap_nanos, issued_at, expires_at, end_policy, prices`

func insertLease(ctx context.Context, tx db.Tx, l lease) error {
	prices, err := json.Marshal(append([]frozen{}, l.prices...))
	if err != nil {
		return fmt.Errorf("prices of lease %d of %s: %w", l.no, l.subjectID, err)
	}
	return tx.Later(ctx, `INSERT INTO leases (`+leaseColumns+`, duration_seconds) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)`,
		l.subjectID, l.no, l.nodeID, l.holdID, l.currency, l.cap, l.issuedAt, l.expiresAt, l.endPolicy, prices, int64(l.expiresAt.Sub(l.issuedAt)/time.Second))
}

// leasesOf are the subjects' leases that end after a moment, one for each subject, in order.
func leasesOf(ctx context.Context, tx db.Tx, subjectIDs []string, after []time.Time) ([]lease, error) {
	return collect(ctx, tx, scanLease, `SELECT `+leaseColumns+` FROM unnest($1::uuid[], $2::timestamptz[]) AS x(id, since)
		JOIN leases ON subject_id = x.id AND expires_at > x.since ORDER BY subject_id, lease_no`, uuids(subjectIDs), after)
}

// suspendedOf is what a member has in suspense, by meter.
func suspendedOf(ctx context.Context, tx db.Tx, memberID string) (map[string]int64, error) {
	return db.Pairs[string, int64](tx.Query(ctx, `SELECT meter, least(sum(quantity), 9223372036854775807)::int8 FROM suspense_records WHERE member_id = $1 AND reason <> $2 AND quantity > 0 GROUP BY meter`,
		memberID, SuspenseAlreadyBilled))
}

// hastenRenewals makes the next lease of members due at once of whose running time more than holdMargin went into suspense since their
// latest lease: the node has counted it against that lease.
func hastenRenewals(ctx context.Context, tx db.Tx, memberIDs []string, now time.Time) error {
	if len(memberIDs) == 0 {
		return nil
	}
	_, err := tx.Exec(ctx, `UPDATE subjects SET renew_at = $2 WHERE id = ANY($1::uuid[]) AND closed_at IS NULL AND renew_at > $2 AND $3 < (
		SELECT coalesce(sum(r.quantity), 0) FROM suspense_records r JOIN leases l ON l.subject_id = subjects.id AND l.lease_no = subjects.lease_no
		WHERE r.member_id = subjects.id::text AND r.meter = $4 AND r.reason <> $5 AND r.created_at > l.issued_at)`,
		memberIDs, now, holdMargin.Microseconds(), protocol.MeterSessionSeconds, SuspenseAlreadyBilled)
	return err
}

// account is a member with its hold and, while it is open, what its latest lease charges; each is zero where there is none.
type account struct {
	subject  Subject
	hold     hold
	currency string
	prices   []frozen
}

func accountsOf(ctx context.Context, tx db.Tx, subjectIDs []string) ([]account, error) {
	return collect(ctx, tx, func(row pgx.Row) (a account, err error) {
		var prices []byte
		if err := row.Scan(&a.subject.ID, &a.subject.CPUMillis, &a.subject.MemoryBytes, &a.hold.currency, &a.hold.placed, &a.hold.posted, &a.hold.released,
			&a.currency, &prices); err != nil || prices == nil {
			return a, err
		}
		return a, json.Unmarshal(prices, &a.prices)
	}, `SELECT s.id, s.cpu_millis, s.memory_bytes, coalesce(h.currency, ''), coalesce(h.placed_nanos, 0), coalesce(h.posted_nanos, 0), coalesce(h.released_nanos, 0),
			coalesce(l.currency, ''), l.prices
		FROM subjects s LEFT JOIN holds h ON h.subject_id = s.id LEFT JOIN leases l ON l.subject_id = s.id AND l.lease_no = s.lease_no AND s.closed_at IS NULL
		WHERE s.id = ANY($1::uuid[]) ORDER BY s.id`, subjectIDs)
}

func lastLeaseEnd(ctx context.Context, tx db.Tx, subjectID string) (end time.Time, err error) {
	err = tx.QueryRow(ctx, `SELECT l.expires_at FROM subjects s JOIN leases l ON l.subject_id = s.id AND l.lease_no = s.lease_no WHERE s.id = $1`, subjectID).Scan(&end)
	if db.IsNoRows(err) {
		return time.Time{}, nil
	}
	return end, err
}

// Leasing gives those of the nodes that are to hold leases.
func Leasing(ctx context.Context, tx db.Tx, nodeIDs []string) (map[string]bool, error) {
	return db.Pairs[string, bool](tx.Query(ctx, `SELECT DISTINCT s.node_id, true FROM subjects s JOIN leases l ON l.subject_id = s.id AND l.lease_no = s.lease_no
		WHERE s.node_id = ANY($1::uuid[]) AND s.settled_at IS NULL AND s.closed_at IS NULL AND s.kind = 'member'`, nodeIDs))
}

func latestLeases(ctx context.Context, tx db.Tx, nodeID string) ([]lease, error) {
	return collect(ctx, tx, scanLease, `SELECT l.subject_id, l.lease_no, l.node_id, l.hold_id, l.currency, l.cap_nanos, l.issued_at, l.expires_at, l.end_policy, l.prices
		FROM subjects s JOIN leases l ON l.subject_id = s.id AND l.lease_no = s.lease_no
		WHERE s.node_id = $1 AND s.settled_at IS NULL AND s.closed_at IS NULL AND s.kind = 'member' ORDER BY l.subject_id`, nodeID)
}
