package ledger

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/rating"
)

// Batches are written with one statement a table: arrays of columns, spread by unnest.

func insertUsage(ctx context.Context, tx db.Tx, rows []usageRow, nodeID, incarnation string, now time.Time) error {
	if len(rows) == 0 {
		return nil
	}
	var c struct {
		ids, subjects, orgs, projects, instances, incarnations, sources, meters, runs, postings []string
		sequences, quantities, measured, revisions, leases                                      []int64
		from, to                                                                                []time.Time
	}
	for _, r := range rows {
		c.ids, c.subjects, c.orgs, c.projects = append(c.ids, db.NewID()), append(c.subjects, r.subject.ID), append(c.orgs, r.subject.OrgID), append(c.projects, r.subject.ProjectID)
		c.instances, c.incarnations, c.sources = append(c.instances, r.subject.AppInstanceID), append(c.incarnations, incarnation), append(c.sources, r.source)
		c.meters, c.runs, c.postings = append(c.meters, r.meter), append(c.runs, r.runID), append(c.postings, r.postingID)
		c.sequences, c.quantities, c.measured = append(c.sequences, r.sequence), append(c.quantities, r.accepted), append(c.measured, r.quantity)
		c.revisions, c.leases = append(c.revisions, r.revision), append(c.leases, r.leaseNo)
		c.from, c.to = append(c.from, r.span.From), append(c.to, r.span.To)
	}
	_, err := tx.Exec(ctx, `INSERT INTO usage_records (id, subject_id, org_id, project_id, app_instance_id, node_id, incarnation, sequence, usage_source, meter,
			quantity, measured_quantity, started_at, ended_at, revision, run_id, lease_no, posting_id, created_at)
		SELECT x.id::uuid, x.subject::uuid, x.org::uuid, x.project::uuid, nullif(x.instance, '')::uuid, $18::uuid, nullif(x.incarnation, ''), nullif(x.sequence, 0),
			x.source, x.meter, x.quantity, x.measured, x.started, x.ended, x.revision, x.run, x.lease, nullif(x.posting, '')::uuid, $19::timestamptz
		FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::int8[], $8::text[], $9::text[], $10::int8[], $11::int8[],
			$12::timestamptz[], $13::timestamptz[], $14::int8[], $15::text[], $16::int8[], $17::text[])
		AS x(id, subject, org, project, instance, incarnation, sequence, source, meter, quantity, measured, started, ended, revision, run, lease, posting)`,
		c.ids, c.subjects, c.orgs, c.projects, c.instances, c.incarnations, c.sequences, c.sources, c.meters, c.quantities, c.measured,
		c.from, c.to, c.revisions, c.runs, c.leases, c.postings, nodeID, now)
	return err
}

func insertSuspense(ctx context.Context, tx db.Tx, rows []suspenseRow, nodeID, incarnation string, now time.Time) error {
	if len(rows) == 0 {
		return nil
	}
	var c struct {
		ids, members, meters, reasons []string
		sequences, quantities         []int64
		from, to                      []time.Time
	}
	for _, r := range rows {
		c.ids, c.members, c.meters, c.reasons = append(c.ids, db.NewID()), append(c.members, r.memberID), append(c.meters, r.meter), append(c.reasons, r.piece.reason)
		c.sequences, c.quantities = append(c.sequences, r.sequence), append(c.quantities, r.piece.quantity)
		c.from, c.to = append(c.from, r.piece.span.From), append(c.to, r.piece.span.To)
	}
	_, err := tx.Exec(ctx, `INSERT INTO suspense_records (id, node_id, incarnation, sequence, member_id, meter, quantity, started_at, ended_at, reason, created_at)
		SELECT x.id::uuid, $9::uuid, $10::text, x.sequence, x.member, x.meter, x.quantity, x.started, x.ended, x.reason, $11::timestamptz
		FROM unnest($1::text[], $2::int8[], $3::text[], $4::text[], $5::int8[], $6::timestamptz[], $7::timestamptz[], $8::text[])
		AS x(id, sequence, member, meter, quantity, started, ended, reason)`,
		c.ids, c.sequences, c.members, c.meters, c.quantities, c.from, c.to, c.reasons, nodeID, incarnation, now)
	return err
}

// takeTurn makes two transactions that bill one node conflict here and now.
func takeTurn(ctx context.Context, tx db.Tx, nodeID string) error {
	_, err := tx.Exec(ctx, `INSERT INTO usage_nodes (node_id, segments) VALUES ($1, 1)
		ON CONFLICT (node_id) DO UPDATE SET segments = usage_nodes.segments + 1`, nodeID)
	return err
}

func sequences(ctx context.Context, tx db.Tx, nodeID, incarnation string) ([]sequenceRange, error) {
	return collect(ctx, tx, func(row pgx.Row) (r sequenceRange, err error) {
		err = row.Scan(&r.from, &r.to)
		return r, err
	}, `SELECT from_sequence, to_sequence FROM usage_sequences WHERE node_id = $1 AND incarnation = $2 ORDER BY from_sequence`, nodeID, incarnation)
}

func saveSequences(ctx context.Context, tx db.Tx, nodeID, incarnation string, before []sequenceRange, added []record) error {
	after := joinSequences(before, added)
	for _, r := range before {
		if !slices.ContainsFunc(after, func(a sequenceRange) bool { return a.from == r.from }) {
			if _, err := tx.Exec(ctx, `DELETE FROM usage_sequences WHERE node_id = $1 AND incarnation = $2 AND from_sequence = $3`, nodeID, incarnation, r.from); err != nil {
				return err
			}
		}
	}
	for _, r := range after {
		if slices.Contains(before, r) {
			continue
		}
		if _, err := tx.Exec(ctx, `INSERT INTO usage_sequences (node_id, incarnation, from_sequence, to_sequence) VALUES ($1, $2, $3, $4)
			ON CONFLICT (node_id, incarnation, from_sequence) DO UPDATE SET to_sequence = excluded.to_sequence`, nodeID, incarnation, r.from, r.to); err != nil {
			return err
		}
	}
	return nil
}

type coverageRow struct {
	key  coverageKey
	span rating.Interval
}

// coverageOf is the billed time of the subjects that ends at or after a moment.
func coverageOf(ctx context.Context, tx db.Tx, subjectIDs []string, from time.Time) (map[coverageKey][]rating.Interval, error) {
	rows, err := collect(ctx, tx, func(row pgx.Row) (c coverageRow, err error) {
		err = row.Scan(&c.key.subjectID, &c.key.meter, &c.key.runID, &c.span.From, &c.span.To)
		return c, err
	}, `SELECT subject_id, meter, run_id, from_at, to_at FROM usage_coverage WHERE subject_id = ANY($1::uuid[]) AND to_at >= $2 ORDER BY from_at`, subjectIDs, from)
	out := map[coverageKey][]rating.Interval{}
	for _, r := range rows {
		out[r.key] = append(out[r.key], r.span)
	}
	return out, err
}

func coveredUntil(ctx context.Context, tx db.Tx, subjectID, meter string) (time.Time, error) {
	var at *time.Time
	err := tx.QueryRow(ctx, `SELECT max(to_at) FROM usage_coverage WHERE subject_id = $1 AND meter = $2`, subjectID, meter).Scan(&at)
	if err != nil || at == nil {
		return time.Time{}, err
	}
	return *at, nil
}

// saveCoverage writes the difference between two sets of joined intervals.
func saveCoverage(ctx context.Context, tx db.Tx, before, after map[coverageKey][]rating.Interval) error {
	var gone, kept coverageColumns
	for key, spans := range after {
		for _, b := range before[key] {
			if !slices.ContainsFunc(spans, func(a rating.Interval) bool { return a.From.Equal(b.From) }) {
				gone.add(key, b)
			}
		}
		for _, a := range spans {
			if !slices.ContainsFunc(before[key], func(b rating.Interval) bool { return a.From.Equal(b.From) && a.To.Equal(b.To) }) {
				kept.add(key, a)
			}
		}
	}
	if len(gone.subjects) > 0 {
		if _, err := tx.Exec(ctx, `DELETE FROM usage_coverage WHERE (subject_id, meter, run_id, from_at) IN (
			SELECT x.subject::uuid, x.meter, x.run, x.started FROM unnest($1::text[], $2::text[], $3::text[], $4::timestamptz[]) AS x(subject, meter, run, started))`,
			gone.subjects, gone.meters, gone.runs, gone.from); err != nil {
			return err
		}
	}
	if len(kept.subjects) == 0 {
		return nil
	}
	_, err := tx.Exec(ctx, `INSERT INTO usage_coverage (subject_id, meter, run_id, from_at, to_at)
		SELECT x.subject::uuid, x.meter, x.run, x.started, x.ended
		FROM unnest($1::text[], $2::text[], $3::text[], $4::timestamptz[], $5::timestamptz[]) AS x(subject, meter, run, started, ended)
		ON CONFLICT (subject_id, meter, run_id, from_at) DO UPDATE SET to_at = excluded.to_at`,
		kept.subjects, kept.meters, kept.runs, kept.from, kept.to)
	return err
}

type coverageColumns struct {
	subjects, meters, runs []string
	from, to               []time.Time
}

func (c *coverageColumns) add(k coverageKey, i rating.Interval) {
	c.subjects, c.meters, c.runs = append(c.subjects, k.subjectID), append(c.meters, k.meter), append(c.runs, k.runID)
	c.from, c.to = append(c.from, i.From), append(c.to, i.To)
}

type accrualRow struct {
	key accrualKey
	rating.Accrual
}

// accrualsOf are the subjects' accruals from an hour on.
func accrualsOf(ctx context.Context, tx db.Tx, subjectIDs []string, from time.Time) (map[accrualKey]rating.Accrual, error) {
	rows, err := collect(ctx, tx, func(row pgx.Row) (a accrualRow, err error) {
		err = row.Scan(&a.key.subjectID, &a.key.meter, &a.key.priceID, &a.key.hour,
			&a.Quantity, &a.ChargedNanos, &a.CollectedNanos, &a.WrittenOffNanos, &a.HostNanos)
		a.key.hour = a.key.hour.UTC()
		return a, err
	}, `SELECT subject_id, meter, price_id, hour, quantity, charged_nanos, collected_nanos, written_off_nanos, host_nanos
		FROM accruals WHERE subject_id = ANY($1::uuid[]) AND hour >= $2`, subjectIDs, from)
	out := make(map[accrualKey]rating.Accrual, len(rows))
	for _, r := range rows {
		out[r.key] = r.Accrual
	}
	return out, err
}

func upsertAccruals(ctx context.Context, tx db.Tx, changed map[accrualKey]rating.Accrual) error {
	if len(changed) == 0 {
		return nil
	}
	var c struct {
		subjects, meters, prices                         []string
		hours                                            []time.Time
		quantities, charged, collected, writtenOff, host []int64
	}
	for _, k := range slices.SortedFunc(maps.Keys(changed), accrualKey.compare) {
		a := changed[k]
		c.subjects, c.meters, c.prices, c.hours = append(c.subjects, k.subjectID), append(c.meters, k.meter), append(c.prices, k.priceID), append(c.hours, k.hour)
		c.quantities, c.charged, c.collected = append(c.quantities, a.Quantity), append(c.charged, a.ChargedNanos), append(c.collected, a.CollectedNanos)
		c.writtenOff, c.host = append(c.writtenOff, a.WrittenOffNanos), append(c.host, a.HostNanos)
	}
	_, err := tx.Exec(ctx, `INSERT INTO accruals (subject_id, meter, price_id, hour, quantity, charged_nanos, collected_nanos, written_off_nanos, host_nanos)
		SELECT x.subject::uuid, x.meter, x.price::uuid, x.hour, x.quantity, x.charged, x.collected, x.written_off, x.host
		FROM unnest($1::text[], $2::text[], $3::text[], $4::timestamptz[], $5::int8[], $6::int8[], $7::int8[], $8::int8[], $9::int8[])
		AS x(subject, meter, price, hour, quantity, charged, collected, written_off, host)
		ON CONFLICT (subject_id, meter, price_id, hour) DO UPDATE SET quantity = excluded.quantity, charged_nanos = excluded.charged_nanos,
			collected_nanos = excluded.collected_nanos, written_off_nanos = excluded.written_off_nanos, host_nanos = excluded.host_nanos`,
		c.subjects, c.meters, c.prices, c.hours, c.quantities, c.charged, c.collected, c.writtenOff, c.host)
	return err
}

// drawHolds writes what usage has taken from holds.
func drawHolds(ctx context.Context, tx db.Tx, drawn map[string]hold) error {
	if len(drawn) == 0 {
		return nil
	}
	var ids []string
	var posted []int64
	for _, id := range slices.Sorted(maps.Keys(drawn)) {
		ids, posted = append(ids, id), append(posted, drawn[id].posted)
	}
	_, err := tx.Exec(ctx, `UPDATE holds SET posted_nanos = x.posted FROM unnest($1::text[], $2::int8[]) AS x(id, posted) WHERE holds.id = x.id::uuid`, ids, posted)
	return err
}

func insertPostings(ctx context.Context, tx db.Tx, postings ...Posting) error {
	if len(postings) == 0 {
		return nil
	}
	var c struct {
		ids, keys, kinds, subjectKinds, subjects, orgs, projects, instances, meters, prices, corrects, descriptions, correlations []string
		from, to                                                                                                                  []*time.Time
		created                                                                                                                   []time.Time
	}
	var e struct {
		postings, accounts, currencies []string
		legs, nanos                    []int64
	}
	for _, p := range postings {
		c.ids, c.keys, c.kinds, c.subjectKinds = append(c.ids, p.ID), append(c.keys, p.Key), append(c.kinds, p.Kind), append(c.subjectKinds, p.SubjectKind)
		c.subjects, c.orgs, c.projects, c.instances = append(c.subjects, p.SubjectID), append(c.orgs, p.OrgID), append(c.projects, p.ProjectID), append(c.instances, p.AppInstanceID)
		c.meters, c.prices, c.corrects = append(c.meters, p.Meter), append(c.prices, p.PriceID), append(c.corrects, p.Corrects)
		c.descriptions, c.correlations = append(c.descriptions, p.Description), append(c.correlations, p.CorrelationID)
		c.from, c.to, c.created = append(c.from, timeOrNull(p.PeriodFrom)), append(c.to, timeOrNull(p.PeriodTo)), append(c.created, p.CreatedAt)
		for i, l := range p.Legs {
			e.postings, e.accounts, e.currencies = append(e.postings, p.ID), append(e.accounts, l.Account), append(e.currencies, l.Currency)
			e.legs, e.nanos = append(e.legs, int64(i)), append(e.nanos, l.Nanos)
		}
	}
	if _, err := tx.Exec(ctx, `INSERT INTO postings (id, key, kind, subject_kind, subject_id, org_id, project_id, app_instance_id, meter, price_id,
			period_from, period_to, corrects, description, correlation_id, created_at)
		SELECT x.id::uuid, x.key, x.kind, x.subject_kind, x.subject::uuid, x.org::uuid, nullif(x.project, '')::uuid, nullif(x.instance, '')::uuid, x.meter,
			nullif(x.price, '')::uuid, x.period_from, x.period_to, nullif(x.corrects, '')::uuid, x.description, x.correlation, x.created
		FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[], $9::text[], $10::text[],
			$11::timestamptz[], $12::timestamptz[], $13::text[], $14::text[], $15::text[], $16::timestamptz[])
		AS x(id, key, kind, subject_kind, subject, org, project, instance, meter, price, period_from, period_to, corrects, description, correlation, created)`,
		c.ids, c.keys, c.kinds, c.subjectKinds, c.subjects, c.orgs, c.projects, c.instances, c.meters, c.prices,
		c.from, c.to, c.corrects, c.descriptions, c.correlations, c.created); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, `INSERT INTO entries (posting_id, leg, account, currency, amount_nanos)
		SELECT x.posting::uuid, x.leg, x.account, x.currency, x.nanos
		FROM unnest($1::text[], $2::int8[], $3::text[], $4::text[], $5::int8[]) AS x(posting, leg, account, currency, nanos)`,
		e.postings, e.legs, e.accounts, e.currencies, e.nanos)
	return err
}

func timeOrNull(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}
