package ledger

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

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
	var c struct {
		ids, nodes                             []pgtype.UUID
		incarnations, members, meters, reasons []string
		sequences, quantities                  []int64
		from, to                               []time.Time
	}
	for _, r := range rows {
		c.ids, c.nodes, c.incarnations = append(c.ids, id(db.NewID())), append(c.nodes, id(r.Store.NodeID)),
			append(c.incarnations, r.Store.Incarnation)
		c.members, c.meters, c.reasons = append(c.members, r.MemberID), append(c.meters, r.Meter),
			append(c.reasons, r.Piece.Reason)
		c.sequences, c.quantities = append(c.sequences, r.Sequence), append(c.quantities, r.Piece.Quantity)
		c.from, c.to = append(c.from, r.Piece.Span.From), append(c.to, r.Piece.Span.To)
	}
	_, err = tx.Exec(ctx,
		`INSERT INTO suspense_records (id, node_id, incarnation, sequence, member_id, meter, quantity, started_at, ended_at,
			reason, created_at)
		SELECT x.*, $11::timestamptz FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::int8[], $5::text[], $6::text[],
		$7::int8[],
			$8::timestamptz[], $9::timestamptz[], $10::text[]) AS x`,
		c.ids, c.nodes, c.incarnations, c.sequences, c.members, c.meters, c.quantities, c.from, c.to, c.reasons, now)
	return err
}

type coverageRow struct {
	key  billing.TimeKey
	span rating.Interval
}

// loadCoverage reads the billed time of keys that ends at or after a moment, each key's own, at most billing.MaxSpans
// intervals of each: a key that has as many gets no more. of are the subjects by id.
func loadCoverage(ctx context.Context, tx db.Tx, of map[string]*subject,
	billed map[billing.TimeKey]*billing.BilledTime,
) (map[billing.TimeKey][]rating.Interval, error) {
	var c coverageColumns
	for key, b := range billed {
		c.add(of, key, rating.Interval{From: b.Since})
	}
	stored := make(map[billing.TimeKey][]rating.Interval, len(billed))
	_, err := collect(ctx, tx, func(row pgx.Row) (_ struct{}, err error) {
		var r coverageRow
		err = row.Scan(&r.key.MemberID, &r.key.Meter, &r.key.RunID, &r.span.From, &r.span.To)
		stored[r.key] = append(stored[r.key], r.span)
		return struct{}{}, err
	}, `SELECT x.subject, x.meter, x.run, c.from_at, c.to_at
		FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::timestamptz[]) AS x(node, subject, meter, run, since)
		CROSS JOIN LATERAL (SELECT u.from_at, u.to_at FROM usage_coverage u WHERE u.node_id = x.node
		AND u.subject_id = x.subject AND u.meter = x.meter AND u.run_id = x.run
			AND u.from_at >= coalesce((SELECT max(p.from_at) FROM usage_coverage p
				WHERE p.node_id = x.node AND p.subject_id = x.subject AND p.meter = x.meter AND p.run_id = x.run
					AND p.from_at <= x.since), x.since)
			ORDER BY u.from_at LIMIT $6) AS c`,
		c.nodes, c.subjects, c.meters, c.runs, c.from, billing.MaxSpans)
	for key, b := range billed {
		b.Coverage = rating.NewCoverage(slices.Clone(stored[key]))
	}
	return stored, err
}

func coveredUntil(ctx context.Context, tx db.Tx, s subject, meter string) (time.Time, error) {
	var at *time.Time
	err := tx.QueryRow(ctx, `SELECT max(to_at) FROM usage_coverage
		WHERE node_id = $1 AND subject_id = $2 AND meter = $3`, s.NodeID, s.ID, meter).Scan(&at)
	if err != nil || at == nil {
		return time.Time{}, err
	}
	return *at, nil
}

// saveCoverage writes what the batch has changed of the billed time.
func saveCoverage(ctx context.Context, tx db.Tx, of map[string]*subject,
	stored map[billing.TimeKey][]rating.Interval, billed map[billing.TimeKey]*billing.BilledTime,
) error {
	var gone, kept coverageColumns
	for key, b := range billed {
		removed, changed := rating.Changes(stored[key], b.Spans())
		for _, i := range removed {
			gone.add(of, key, i)
		}
		for _, i := range changed {
			kept.add(of, key, i)
		}
	}
	if len(gone.subjects) > 0 {
		if _, err := tx.Exec(ctx, `DELETE FROM usage_coverage WHERE (node_id, subject_id, meter, run_id, from_at) IN (
			SELECT x.node, x.subject, x.meter, x.run, x.started
			FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::timestamptz[])
				AS x(node, subject, meter, run, started))`,
			gone.nodes, gone.subjects, gone.meters, gone.runs, gone.from); err != nil {
			return err
		}
	}
	if len(kept.subjects) == 0 {
		return nil
	}
	_, err := tx.Exec(ctx, `INSERT INTO usage_coverage (node_id, subject_id, meter, run_id, from_at, to_at)
		SELECT x.* FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::timestamptz[], $6::timestamptz[]) AS x
		ON CONFLICT (node_id, subject_id, meter, run_id, from_at) DO UPDATE SET to_at = excluded.to_at`,
		kept.nodes, kept.subjects, kept.meters, kept.runs, kept.from, kept.to)
	return err
}

type coverageColumns struct {
	nodes, subjects []pgtype.UUID
	meters, runs    []string
	from, to        []time.Time
}

func (c *coverageColumns) add(of map[string]*subject, k billing.TimeKey, i rating.Interval) {
	c.nodes, c.subjects = append(c.nodes, id(of[k.MemberID].NodeID)), append(c.subjects, id(k.MemberID))
	c.meters, c.runs = append(c.meters, k.Meter), append(c.runs, k.RunID)
	c.from, c.to = append(c.from, i.From), append(c.to, i.To)
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
	_, err := collect(ctx, tx, func(row pgx.Row) (_ struct{}, err error) {
		var h billing.Hour
		err = row.Scan(&h.MemberID, &h.Hour, &h.Meter, &h.PriceID, &h.Quantity, &h.Records, &h.ChargedNanos,
			&h.CollectedNanos, &h.WrittenOffNanos, &h.HostNanos)
		h.Hour = h.Hour.UTC()
		if h.PriceID == noPrice {
			h.PriceID = ""
		}
		*book.Hour(h.AccrualKey) = h
		return struct{}{}, err
	},
		`SELECT h.subject_id, h.hour, h.meter, h.price_id, h.quantity, h.records, h.charged_nanos, h.collected_nanos,
			h.written_off_nanos, h.host_nanos
		FROM unnest($1::uuid[], $2::uuid[], $3::timestamptz[], $4::timestamptz[]) AS x(node, subject, started, ended)
		JOIN usage_hours h ON h.node_id = x.node AND h.subject_id = x.subject AND h.hour >= x.started AND h.hour < x.ended`,
		nodes, ids, from, to)
	return err
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
	var nodes, subjects, prices []pgtype.UUID
	var meters []string
	var hours []time.Time
	var quantities, records, charged, collected, writtenOff, host []int64
	for _, k := range slices.SortedFunc(maps.Keys(changed), billing.AccrualKey.Compare) {
		a := changed[k]
		nodes = append(nodes, id(of[k.MemberID].NodeID))
		subjects, prices = append(subjects, id(k.MemberID)), append(prices, id(cmp.Or(k.PriceID, noPrice)))
		meters, hours = append(meters, k.Meter), append(hours, k.Hour)
		quantities, records, charged = append(quantities, a.Quantity), append(records, a.records),
			append(charged, a.ChargedNanos)
		collected, writtenOff, host = append(collected, a.CollectedNanos), append(writtenOff, a.WrittenOffNanos),
			append(host, a.HostNanos)
	}
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
		nodes, subjects, hours, meters, prices, quantities, records, charged, collected, writtenOff, host)
	return err
}

// drawHolds writes what usage has taken from holds.
func drawHolds(ctx context.Context, tx db.Tx, drawn map[string]hold) error {
	if len(drawn) == 0 {
		return nil
	}
	var nodes, ids []pgtype.UUID
	var posted []int64
	for _, subjectID := range slices.Sorted(maps.Keys(drawn)) {
		h := drawn[subjectID]
		nodes, ids, posted = append(nodes, id(h.nodeID)), append(ids, id(subjectID)), append(posted, h.Posted)
	}
	_, err := tx.Exec(ctx,
		`UPDATE holds SET posted_nanos = x.posted FROM unnest($1::uuid[], $2::uuid[], $3::int8[]) AS x(node, id, posted)
		WHERE holds.node_id = x.node AND holds.subject_id = x.id`, nodes, ids, posted)
	return err
}

func insertPostings(ctx context.Context, tx db.Tx, postings ...Posting) error {
	if len(postings) == 0 {
		return nil
	}
	var c struct {
		ids, subjects, orgs, projects, instances, prices, corrects    []pgtype.UUID
		keys, kinds, subjectKinds, meters, descriptions, correlations []string
		from, to                                                      []*time.Time
		created                                                       []time.Time
	}
	var e struct {
		postings             []pgtype.UUID
		accounts, currencies []string
		legs, nanos          []int64
	}
	for _, p := range postings {
		own := id(p.ID)
		c.ids, c.keys, c.kinds, c.subjectKinds = append(c.ids, own), append(c.keys, p.Key), append(c.kinds, p.Kind),
			append(c.subjectKinds, p.SubjectKind)
		c.subjects, c.orgs, c.projects, c.instances = append(c.subjects, id(p.SubjectID)), append(c.orgs, id(p.OrgID)),
			append(c.projects, id(p.ProjectID)), append(c.instances, id(p.AppInstanceID))
		c.meters, c.prices, c.corrects = append(c.meters, p.Meter), append(c.prices, id(p.PriceID)),
			append(c.corrects, id(p.Corrects))
		c.descriptions, c.correlations = append(c.descriptions, p.Description), append(c.correlations, p.CorrelationID)
		c.from, c.to, c.created = append(c.from, timeOrNull(p.PeriodFrom)), append(c.to, timeOrNull(p.PeriodTo)),
			append(c.created, p.CreatedAt)
		for i, l := range p.Legs {
			e.postings, e.accounts, e.currencies = append(e.postings, own), append(e.accounts, l.Account),
				append(e.currencies, l.Currency)
			e.legs, e.nanos = append(e.legs, int64(i)), append(e.nanos, l.Nanos)
		}
	}
	if err := tx.Queue(ctx,
		`INSERT INTO postings (id, key, kind, subject_kind, subject_id, org_id, project_id, app_instance_id, meter, price_id,
			period_from, period_to, corrects, description, correlation_id, created_at)
		SELECT x.* FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::uuid[], $6::uuid[], $7::uuid[], $8::uuid[],
		$9::text[], $10::uuid[],
			$11::timestamptz[], $12::timestamptz[], $13::uuid[], $14::text[], $15::text[], $16::timestamptz[]) AS x`,
		c.ids, c.keys, c.kinds, c.subjectKinds, c.subjects, c.orgs, c.projects, c.instances, c.meters, c.prices,
		c.from, c.to, c.corrects, c.descriptions, c.correlations, c.created); err != nil {
		return err
	}
	return tx.Queue(ctx, `INSERT INTO entries (posting_id, leg, account, currency, amount_nanos)
		SELECT x.* FROM unnest($1::uuid[], $2::int8[], $3::text[], $4::text[], $5::int8[]) AS x`,
		e.postings, e.legs, e.accounts, e.currencies, e.nanos)
}

func timeOrNull(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}
