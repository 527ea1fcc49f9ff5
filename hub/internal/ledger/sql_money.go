package ledger

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/protocol"
)

func scanPrice(row pgx.CollectableRow) (Price, error) {
	var p Price
	err := row.Scan(&p.ID, &p.Meter, &p.AppSlug, &p.SKU, &p.Currency, &p.Nanos, &p.Per, &p.PerQuantity, &p.HostBasisPoints,
		&p.From, &p.CreatedAt)
	return p, err
}

const priceColumns = `id, meter, app_slug, sku, currency, nanos, per, per_quantity, host_basis_points, from_at,
	created_at`

func insertPrice(ctx context.Context, tx db.Tx, p Price) (made bool, err error) {
	tag, err := tx.Exec(ctx, `INSERT INTO prices (`+priceColumns+`) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
		ON CONFLICT (meter, app_slug, sku, currency, from_at) DO NOTHING`,
		p.ID, p.Meter, p.AppSlug, p.SKU, p.Currency, p.Nanos, p.Per, p.PerQuantity, p.HostBasisPoints, p.From, p.CreatedAt)
	return tag.RowsAffected() == 1, err
}

func pricesOf(ctx context.Context, tx db.Tx, meters []string) ([]Price, error) {
	return db.Select(ctx, tx, scanPrice, `SELECT `+priceColumns+
		` FROM prices WHERE meter = ANY($1::text[]) ORDER BY from_at, id`, meters)
}

func walletBalance(ctx context.Context, tx db.Tx, orgID, currency string) (nanos int64, err error) {
	err = tx.QueryRow(ctx, `SELECT balance_nanos FROM wallets WHERE org_id = $1 AND currency = $2 FOR UPDATE`, orgID,
		currency).Scan(&nanos)
	if db.IsNoRows(err) {
		return 0, nil
	}
	return nanos, err
}

// drawWallet takes from a wallet what it covers; nanos is below zero.
func drawWallet(ctx context.Context, tx db.Tx, orgID, currency string, nanos int64) (covered bool, err error) {
	tag, err := tx.Exec(ctx,
		`UPDATE wallets SET balance_nanos = balance_nanos + $3 WHERE org_id = $1 AND currency = $2
			AND balance_nanos >= -$3::int8`,
		orgID, currency, nanos)
	return tag.RowsAffected() == 1, err
}

func oldestWallet(ctx context.Context, tx db.Tx, orgID string) (currency string, err error) {
	err = tx.QueryRow(ctx, `SELECT currency FROM wallets WHERE org_id = $1 ORDER BY created_at, currency LIMIT 1`,
		orgID).Scan(&currency)
	if db.IsNoRows(err) {
		return "", nil
	}
	return currency, err
}

func scanHold(row pgx.CollectableRow) (hold, error) {
	var h hold
	err := row.Scan(&h.id, &h.nodeID, &h.subjectID, &h.orgID, &h.currency, &h.Placed, &h.Posted, &h.Released)
	return h, err
}

const holdColumns = `id, node_id, subject_id, org_id, currency, placed_nanos, posted_nanos, released_nanos`

func holdOf(ctx context.Context, tx db.Tx, s subject) (hold, bool, error) {
	h, err := db.SelectOne(ctx, tx, scanHold, `SELECT `+holdColumns+` FROM holds
		WHERE node_id = $1 AND subject_id = $2 FOR UPDATE`, s.NodeID, s.ID)
	if db.IsNoRows(err) {
		return hold{}, false, nil
	}
	return h, err == nil, err
}

func holdsOf(ctx context.Context, tx db.Tx, subjects []*subject) (map[string]hold, error) {
	nodes, ids := keysOf(subjects)
	rows, err := db.Select(ctx, tx, scanHold, `SELECT `+holdColumns+
		` FROM unnest($1::uuid[], $2::uuid[]) AS x(node, subject)
		JOIN holds ON node_id = x.node AND subject_id = x.subject`, nodes, ids)
	out := make(map[string]hold, len(rows))
	for _, h := range rows {
		out[h.subjectID] = h
	}
	return out, err
}

func insertHold(ctx context.Context, tx db.Tx, h hold) error {
	return tx.Queue(ctx, `INSERT INTO holds (`+holdColumns+`) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)`,
		h.id, h.nodeID, h.subjectID, h.orgID, h.currency, h.Placed, h.Posted, h.Released)
}

func updateHold(ctx context.Context, tx db.Tx, h hold) error {
	return tx.Queue(ctx,
		`UPDATE holds SET currency = $3, placed_nanos = $4, posted_nanos = $5, released_nanos = $6
		WHERE node_id = $1 AND subject_id = $2`,
		h.nodeID, h.subjectID, h.currency, h.Placed, h.Posted, h.Released)
}

func scanLease(row pgx.CollectableRow) (billing.Lease, error) {
	var l billing.Lease
	var prices []byte
	if err := row.Scan(&l.MemberID, &l.No, &l.NodeID, &l.HoldID, &l.Currency, &l.CapNanos, &l.IssuedAt, &l.ExpiresAt,
		&l.CoveredSince, &l.EndPolicy, &prices); err != nil {
		return l, err
	}
	if err := json.Unmarshal(prices, &l.Prices); err != nil {
		return l, fmt.Errorf("prices of lease %d of %s: %w", l.No, l.MemberID, err)
	}
	return l, nil
}

const leaseColumns = `subject_id, lease_no, node_id, hold_id, currency, cap_nanos, issued_at, expires_at,
	covered_since, end_policy, prices`

func insertLease(ctx context.Context, tx db.Tx, l billing.Lease) error {
	prices, err := json.Marshal(append([]billing.FrozenPrice{}, l.Prices...))
	if err != nil {
		return fmt.Errorf("prices of lease %d of %s: %w", l.No, l.MemberID, err)
	}
	return tx.Queue(ctx, `INSERT INTO leases (`+leaseColumns+
		`, duration_seconds) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)`,
		l.MemberID, l.No, l.NodeID, l.HoldID, l.Currency, l.CapNanos, l.IssuedAt, l.ExpiresAt, l.CoveredSince, l.EndPolicy,
		prices, int64(l.ExpiresAt.Sub(l.IssuedAt)/time.Second))
}

// leasesOf are the subjects' leases that end after a moment, one for each subject, in order.
func leasesOf(ctx context.Context, tx db.Tx, subjects []*subject, after []time.Time) ([]billing.Lease, error) {
	nodes, ids := keysOf(subjects)
	return db.Select(ctx, tx, scanLease, `SELECT `+leaseColumns+` FROM unnest($1::uuid[], $2::uuid[], $3::timestamptz[])
			AS x(node, subject, since)
		JOIN leases ON node_id = x.node AND subject_id = x.subject AND expires_at > x.since
		ORDER BY subject_id, lease_no`, nodes, ids, after)
}

func leaseOf(ctx context.Context, tx db.Tx, s subject, no int64) (billing.Lease, error) {
	return db.SelectOne(ctx, tx, scanLease, `SELECT `+leaseColumns+` FROM leases
		WHERE node_id = $1 AND subject_id = $2 AND lease_no = $3`, s.NodeID, s.ID, no)
}

// suspendedOf is what a member has in suspense, by meter.
func suspendedOf(ctx context.Context, tx db.Tx, s subject) (map[string]int64, error) {
	return db.CollectMap[string, int64](tx.Query(ctx, `SELECT meter, quantity FROM suspense_totals
		WHERE node_id = $1 AND subject_id = $2`, s.NodeID, s.ID))
}

// addSuspended keeps the totals of what is in suspense, each at most what can have been measured by now.
func addSuspended(ctx context.Context, tx db.Tx, of map[string]*subject,
	added map[billing.SuspendedKey]billing.SuspendedSum,
) error {
	keys := slices.SortedFunc(maps.Keys(added), billing.SuspendedKey.Compare)
	columns := columnsOf(keys, func(k billing.SuspendedKey) []any {
		s := added[k]
		return []any{id(of[k.MemberID].NodeID), id(k.MemberID), k.Meter, s.Quantity, s.Since, s.Before}
	})
	if err := tx.Queue(ctx,
		`INSERT INTO suspense_totals (node_id, subject_id, meter, quantity, before_opening, leased_quantity)
		SELECT x.node, x.id, x.meter, 0, 0, 0 FROM unnest($1::uuid[], $2::uuid[], $3::text[]) AS x(node, id, meter)
		ON CONFLICT (node_id, subject_id, meter) DO NOTHING`, columns[:3]...); err != nil {
		return err
	}
	// As billing.SuspendedTotal.Add.
	return tx.Queue(ctx, `UPDATE suspense_totals SET before_opening = greatest(before_opening, x.before),
			quantity = greatest(quantity, least(quantity + x.added, x.since + greatest(before_opening, x.before)))
		FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::int8[], $5::int8[], $6::int8[])
			AS x(node, id, name, added, since, before)
		WHERE suspense_totals.node_id = x.node AND suspense_totals.subject_id = x.id AND suspense_totals.meter = x.name`,
		columns...)
}

// hastenRenewals makes the next lease of members due at once of whose running time more than billing.HoldMargin went
// into suspense since their latest lease: the node has counted it against that lease.
func hastenRenewals(ctx context.Context, tx db.Tx, added map[billing.SuspendedKey]billing.SuspendedSum,
	now time.Time,
) error {
	var ids []pgtype.UUID
	for k := range added {
		if k.Meter == protocol.MeterSessionSeconds {
			ids = append(ids, id(k.MemberID))
		}
	}
	if len(ids) == 0 {
		return nil
	}
	_, err := tx.Exec(ctx,
		`UPDATE subjects SET renew_at = $2 FROM suspense_totals t WHERE subjects.id = ANY($1) AND closed_at IS NULL
			AND renew_at > $2
		AND t.node_id = subjects.node_id AND t.subject_id = subjects.id AND t.meter = $4
			AND t.quantity - t.leased_quantity > $3`,
		ids, now, billing.HoldMargin.Microseconds(), protocol.MeterSessionSeconds)
	return err
}

// account is a member with its hold and, while it is open, what its latest lease charges; each is zero where there is
// none.
type account struct {
	subject  Subject
	hold     hold
	currency string
	// prices is the JSON of []billing.FrozenPrice: one that cannot be read fails its own instance alone.
	prices []byte
}

// ReadAccounts reads the accounts of instances with one statement.
func ReadAccounts(ctx context.Context, tx db.Tx, instanceIDs []string) (Accounts, error) {
	var (
		id  string
		a   account
		all = make(Accounts, len(instanceIDs))
	)
	err := db.ForEach(ctx, tx, []any{
		&id, &a.subject.ID, &a.subject.CPUMillis, &a.subject.MemoryBytes, &a.subject.Accelerators,
		&a.hold.currency, &a.hold.Placed, &a.hold.Posted, &a.hold.Released, &a.currency, &a.prices,
	}, func() {
		all[id] = append(all[id], a)
	},
		`SELECT s.app_instance_id, s.id, s.cpu_millis, s.memory_bytes, s.accelerators, coalesce(h.currency, ''),
			coalesce(h.placed_nanos, 0), coalesce(h.posted_nanos, 0), coalesce(h.released_nanos, 0),
			coalesce(l.currency, ''), l.prices
		FROM subjects s LEFT JOIN holds h ON h.node_id = s.node_id AND h.subject_id = s.id
		LEFT JOIN leases l ON l.node_id = s.node_id AND l.subject_id = s.id AND l.lease_no = s.lease_no
			AND s.closed_at IS NULL
		WHERE s.app_instance_id = ANY($1::UUID[]) AND s.kind = 'member' ORDER BY s.id`, instanceIDs)
	return all, err
}
