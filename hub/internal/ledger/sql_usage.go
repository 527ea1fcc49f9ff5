package ledger

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/rating"
)

// Batches are read and written with one statement a table: arrays of columns, spread by unnest. Ids travel in binary: a
// hundred thousand of them are not worth printing and parsing again.

// id reads one; none at all becomes NULL.
func id(s string) (out pgtype.UUID) {
	if s != "" {
		out.Valid = out.Scan(s) == nil
	}
	return out
}

func uuids(all []string) []pgtype.UUID {
	out := make([]pgtype.UUID, len(all))
	for i, s := range all {
		out[i] = id(s)
	}
	return out
}

// columnsOf turns rows into one array for each column, as unnest takes them; columns returns those of one row.
func columnsOf[T any](rows []T, columns func(T) []any) []any {
	var arrays [][]any
	for _, r := range rows {
		values := columns(r)
		if arrays == nil {
			arrays = make([][]any, len(values))
		}
		for n, v := range values {
			arrays[n] = append(arrays[n], v)
		}
	}
	out := make([]any, len(arrays))
	for n, a := range arrays {
		out[n] = arrayOf(a)
	}
	return out
}

// arrayOf gives values of one type as a slice of that type, which pgx encodes faster than one of any.
func arrayOf(values []any) any {
	switch values[0].(type) {
	case pgtype.UUID:
		return typed[pgtype.UUID](values)
	case string:
		return typed[string](values)
	case int64:
		return typed[int64](values)
	case time.Time:
		return typed[time.Time](values)
	}
	return values
}

func typed[T any](values []any) []T {
	out := make([]T, len(values))
	for n, v := range values {
		out[n], _ = v.(T)
	}
	return out
}

// insertUsage writes raw usage to the current slot.
func insertUsage(ctx context.Context, tx db.Tx, slot Slot, rows []usageRow) error {
	if len(rows) == 0 {
		return nil
	}
	return db.CopyRows(ctx, tx, `COPY usage_records_`+slot.number()+
		` (id, subject_id, meter, quantity, started_at, ended_at, run_id, lease_no,
			posting_id) FROM STDIN BINARY`, rows,
		func(w *db.Row, u *usageRow) {
			w.UUID(db.NewUUID())
			w.UUID(u.subject.uuid())
			w.Text(u.Meter)
			w.Int8(u.accepted)
			w.Time(u.Span.From)
			w.Time(u.Span.To)
			w.Text(u.RunID)
			w.Int8(u.LeaseNo)
			w.UUID(u.posting)
		})
}

// maxSuspenseRows bounds the suspense rows of one node in an hour. Beyond it the sums count and the node's own segments
// are the record.
const maxSuspenseRows = 10_000

// withinBudget drops the rows of nodes that have written maxSuspenseRows in the hour before now.
func withinBudget(ctx context.Context, tx db.Tx, rows []billing.Suspended, now time.Time) ([]billing.Suspended, error) {
	left := map[string]int64{}
	for _, r := range rows {
		left[r.Store.NodeID] = maxSuspenseRows
	}
	written, err := db.CollectMap[string, int64](tx.Query(ctx,
		`SELECT node_id, count(*) FROM suspense_records WHERE node_id = ANY($1::uuid[]) AND created_at > $2 GROUP BY node_id`,
		slices.Sorted(maps.Keys(left)), now.Add(-time.Hour)))
	if err != nil {
		return nil, err
	}
	for node, n := range written {
		left[node] -= n
	}
	return slices.DeleteFunc(slices.Clone(rows), func(r billing.Suspended) bool {
		left[r.Store.NodeID]--
		return left[r.Store.NodeID] < 0
	}), nil
}

func insertSuspense(ctx context.Context, tx db.Tx, rows []billing.Suspended, now time.Time) error {
	if len(rows) == 0 {
		return nil
	}
	rows, err := withinBudget(ctx, tx, rows, now)
	if err != nil || len(rows) == 0 {
		return err
	}
	columns := columnsOf(rows, func(r billing.Suspended) []any {
		return []any{
			db.NewUUID(), id(r.Store.NodeID), r.Store.Incarnation, r.Sequence, r.MemberID, r.Meter, r.Piece.Quantity,
			r.Piece.Span.From, r.Piece.Span.To, r.Piece.Reason,
		}
	})
	_, err = tx.Exec(ctx,
		`INSERT INTO suspense_records (id, node_id, incarnation, sequence, member_id, meter, quantity, started_at, ended_at,
			reason, created_at)
		SELECT x.*, $11::timestamptz FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::int8[], $5::text[], $6::text[],
			$7::int8[], $8::timestamptz[], $9::timestamptz[], $10::text[]) AS x`, append(columns, now)...)
	return err
}

// coverageRow is a billed interval of a key.
type coverageRow struct {
	key  billing.TimeKey
	span rating.Interval
}

// coverageColumns are the columns of rows; of are the subjects by id.
func coverageColumns(of map[string]*subject, rows []coverageRow) []any {
	return columnsOf(rows, func(r coverageRow) []any {
		s := of[r.key.MemberID]
		return []any{id(s.NodeID), s.uuid(), r.key.Meter, r.key.RunID, r.span.From, r.span.To}
	})
}

// loadCoverage reads the billed time of keys that ends at or after a moment, each key's own, at most billing.MaxSpans
// intervals of each: a key that has as many gets no more. of are the subjects by id.
func loadCoverage(ctx context.Context, tx db.Tx, of map[string]*subject,
	billed map[billing.TimeKey]*billing.BilledTime,
) (map[billing.TimeKey][]rating.Interval, error) {
	stored := make(map[billing.TimeKey][]rating.Interval, len(billed))
	if len(billed) == 0 {
		return stored, nil
	}
	since := make([]coverageRow, 0, len(billed))
	for key, b := range billed {
		since = append(since, coverageRow{key, rating.Interval{From: b.Since}})
	}
	var r coverageRow
	into := []any{&r.key.MemberID, &r.key.Meter, &r.key.RunID, &r.span.From, &r.span.To}
	err := db.ForEach(ctx, tx, into, func() {
		stored[r.key] = append(stored[r.key], r.span)
	}, `SELECT x.subject, x.meter, x.run, c.from_at, c.to_at
		FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::timestamptz[]) AS x(node, subject, meter, run, since)
		CROSS JOIN LATERAL (SELECT u.from_at, u.to_at FROM usage_coverage u WHERE u.node_id = x.node
		AND u.subject_id = x.subject AND u.meter = x.meter AND u.run_id = x.run
			AND u.from_at >= coalesce((SELECT max(p.from_at) FROM usage_coverage p
				WHERE p.node_id = x.node AND p.subject_id = x.subject AND p.meter = x.meter AND p.run_id = x.run
					AND p.from_at <= x.since), x.since)
			ORDER BY u.from_at LIMIT $6) AS c`,
		append(coverageColumns(of, since)[:5], billing.MaxSpans)...)
	for key, b := range billed {
		b.Coverage = rating.NewCoverage(slices.Clone(stored[key]))
	}
	return stored, err
}

func coveredUntil(ctx context.Context, tx db.Tx, s subject, meter string) (time.Time, error) {
	var at zeronull.Timestamptz
	err := tx.QueryRow(ctx, `SELECT max(to_at) FROM usage_coverage
		WHERE node_id = $1 AND subject_id = $2 AND meter = $3`, s.NodeID, s.ID, meter).Scan(&at)
	return time.Time(at), err
}

// saveCoverage writes what the batch has changed of the billed time.
func saveCoverage(ctx context.Context, tx db.Tx, of map[string]*subject,
	stored map[billing.TimeKey][]rating.Interval, billed map[billing.TimeKey]*billing.BilledTime,
) error {
	var gone, kept []coverageRow
	for key, b := range billed {
		removed, changed := rating.Changes(stored[key], b.Spans())
		for _, i := range removed {
			gone = append(gone, coverageRow{key, i})
		}
		for _, i := range changed {
			kept = append(kept, coverageRow{key, i})
		}
	}
	if len(gone) > 0 {
		if _, err := tx.Exec(ctx, `DELETE FROM usage_coverage WHERE (node_id, subject_id, meter, run_id, from_at) IN (
			SELECT x.node, x.subject, x.meter, x.run, x.started
			FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::timestamptz[])
				AS x(node, subject, meter, run, started))`, coverageColumns(of, gone)[:5]...); err != nil {
			return err
		}
	}
	if len(kept) == 0 {
		return nil
	}
	_, err := tx.Exec(ctx, `INSERT INTO usage_coverage (node_id, subject_id, meter, run_id, from_at, to_at)
		SELECT x.* FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::timestamptz[], $6::timestamptz[]) AS x
		ON CONFLICT (node_id, subject_id, meter, run_id, from_at) DO UPDATE SET to_at = excluded.to_at`,
		coverageColumns(of, kept)...)
	return err
}

// loadHours reads the hours of subjects that a stretch of each one's time touches into a book.
func loadHours(ctx context.Context, tx db.Tx, subjects []*subject, spans []rating.Interval,
	book *billing.Book,
) error {
	nodes, ids := keysOf(subjects)
	from, to := make([]time.Time, len(spans)), make([]time.Time, len(spans))
	for i, span := range spans {
		from[i], to[i] = billing.HourOf(span.From), span.To
	}
	var h billing.Hour
	into := []any{
		&h.MemberID, &h.Hour, &h.Meter, &h.PriceID, &h.Quantity, &h.Records, &h.ChargedNanos, &h.CollectedNanos,
		&h.WrittenOffNanos, &h.HostNanos,
	}
	return db.ForEach(ctx, tx, into, func() {
		h.Hour = h.Hour.UTC()
		if h.PriceID == noPrice {
			h.PriceID = ""
		}
		*book.Hour(h.AccrualKey) = h
	},
		`SELECT h.subject_id, h.hour, h.meter, h.price_id, h.quantity, h.records, h.charged_nanos, h.collected_nanos,
			h.written_off_nanos, h.host_nanos
		FROM unnest($1::uuid[], $2::uuid[], $3::timestamptz[], $4::timestamptz[]) AS x(node, subject, started, ended)
		JOIN usage_hours h ON h.node_id = x.node AND h.subject_id = x.subject AND h.hour >= x.started AND h.hour < x.ended`,
		nodes, ids, from, to)
}

// noPrice is the price_id of hours without one.
const noPrice = "00000000-0000-0000-0000-000000000000"

// hourRow is an hour as it is now, with the records that are added to it.
type hourRow struct {
	rating.Accrual
	records int64
}

func upsertHours(ctx context.Context, tx db.Tx, of map[string]*subject,
	changed map[billing.AccrualKey]hourRow,
) error {
	if len(changed) == 0 {
		return nil
	}
	keys := slices.SortedFunc(maps.Keys(changed), billing.AccrualKey.Compare)
	columns := columnsOf(keys, func(k billing.AccrualKey) []any {
		a, s := changed[k], of[k.MemberID]
		return []any{
			id(s.NodeID), s.uuid(), k.Hour, k.Meter, id(cmp.Or(k.PriceID, noPrice)), a.Quantity, a.records, a.ChargedNanos,
			a.CollectedNanos, a.WrittenOffNanos, a.HostNanos,
		}
	})
	_, err := tx.Exec(ctx,
		`INSERT INTO usage_hours (node_id, subject_id, hour, meter, price_id, quantity, records, charged_nanos,
			collected_nanos, written_off_nanos, host_nanos)
		SELECT x.* FROM unnest($1::uuid[], $2::uuid[], $3::timestamptz[], $4::text[], $5::uuid[], $6::int8[], $7::int8[],
			$8::int8[], $9::int8[], $10::int8[], $11::int8[]) AS x
		ON CONFLICT (node_id, subject_id, hour, meter, price_id) DO UPDATE
		SET quantity = excluded.quantity, records = usage_hours.records + excluded.records,
			charged_nanos = excluded.charged_nanos, collected_nanos = excluded.collected_nanos, written_off_nanos =
			excluded.written_off_nanos,
			host_nanos = excluded.host_nanos`,
		columns...)
	return err
}

// drawHolds writes what usage has taken from holds.
func drawHolds(ctx context.Context, tx db.Tx, drawn map[string]hold) error {
	if len(drawn) == 0 {
		return nil
	}
	columns := columnsOf(slices.Sorted(maps.Keys(drawn)), func(subjectID string) []any {
		return []any{id(drawn[subjectID].nodeID), id(subjectID), drawn[subjectID].Posted}
	})
	_, err := tx.Exec(ctx,
		`UPDATE holds SET posted_nanos = x.posted FROM unnest($1::uuid[], $2::uuid[], $3::int8[]) AS x(node, id, posted)
		WHERE holds.node_id = x.node AND holds.subject_id = x.id`, columns...)
	return err
}

func insertPostings(ctx context.Context, tx db.Tx, postings ...Posting) error {
	if len(postings) == 0 {
		return nil
	}
	type entry struct {
		posting pgtype.UUID
		leg     int64
		Leg
	}
	var entries []entry
	columns := columnsOf(postings, func(p Posting) []any {
		own := id(p.ID)
		for n, l := range p.Legs {
			entries = append(entries, entry{own, int64(n), l})
		}
		return []any{
			own, p.Key, p.Kind, p.SubjectKind, id(p.SubjectID), id(p.OrgID), id(p.ProjectID), id(p.AppInstanceID), p.Meter,
			id(p.PriceID), db.OrNull(p.PeriodFrom), db.OrNull(p.PeriodTo), id(p.Corrects), p.Description, p.CorrelationID,
			p.CreatedAt,
		}
	})
	if err := tx.Queue(ctx,
		`INSERT INTO postings (id, key, kind, subject_kind, subject_id, org_id, project_id, app_instance_id, meter, price_id,
			period_from, period_to, corrects, description, correlation_id, created_at)
		SELECT x.* FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::uuid[], $6::uuid[], $7::uuid[], $8::uuid[],
			$9::text[], $10::uuid[], $11::timestamptz[], $12::timestamptz[], $13::uuid[], $14::text[], $15::text[],
			$16::timestamptz[]) AS x`, columns...); err != nil {
		return err
	}
	return tx.Queue(ctx, `INSERT INTO entries (posting_id, leg, account, currency, amount_nanos)
		SELECT x.* FROM unnest($1::uuid[], $2::int8[], $3::text[], $4::text[], $5::int8[]) AS x`,
		columnsOf(entries, func(e entry) []any { return []any{e.posting, e.leg, e.Account, e.Currency, e.Nanos} })...)
}
