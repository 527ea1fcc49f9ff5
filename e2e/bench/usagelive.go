package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// filledRows of raw usage are in the table before.
	filledRows = 10_000_000
	// liveNodes send usage at the agent's cadence for liveFor.
	liveNodes = 10_000
	liveFor   = 10 * time.Minute
)

// usageRows measure usage on a filled table.
func usageRows() []Row {
	return []Row{
		{Name: "usage-live", Long: true, Measure: measureLiveUsage},
		{Name: "usage-catchup", Long: true, Measure: func(ctx context.Context, e *Env) ([]Result, error) {
			return measureUploads(ctx, e, "usage-catchup", or(e.Params.Nodes, usageNodes), or(e.Params.Rows, filledRows))
		}},
	}
}

// filledRun marks the rows that were there before: they are not in the books.
const filledRun = "filled"

// fill puts so many rows of raw usage into the slot that usage is written to, as members that are there would have left
// them a while ago. Their ids grow with time, as the hub's do.
func (c *LoadTest) fill(ctx context.Context, rows int) error {
	return c.sql(ctx, func(conn *pgx.Conn) error {
		var slot int
		if err := conn.QueryRow(ctx, `SELECT coalesce((SELECT slot FROM usage_slots ORDER BY from_at DESC LIMIT 1), 0)`).
			Scan(&slot); err != nil {
			return err
		}
		table := fmt.Sprintf("usage_records_%d", slot)
		if _, err := conn.Exec(ctx, `CREATE TEMP TABLE bench_subjects AS SELECT id, row_number() OVER (ORDER BY id) - 1 AS n
			FROM subjects WHERE kind = 'member'; CREATE UNIQUE INDEX ON bench_subjects (n);
			ANALYZE bench_subjects`); err != nil {
			return err
		}
		if _, err := conn.Exec(ctx, `INSERT INTO `+table+` (id, subject_id, meter, quantity, started_at, ended_at, run_id,
				lease_no, posting_id)
			SELECT (lpad(to_hex((extract(epoch FROM ended) * 1000)::int8), 12, '0') || '7' || substr(md5(i::text), 1, 3) ||
				'8' || substr(md5(i::text), 4, 15))::uuid, s.id, (ARRAY['session_seconds', 'cpu_seconds',
				'memory_byte_seconds'])[i % 3 + 1], 30000000, ended - interval '30 seconds', ended, '`+filledRun+`', 1,
				gen_random_uuid()
			FROM (SELECT i, now() - interval '12 hours' + interval '6 hours' * (i::float8 / $1) AS ended
				FROM generate_series(0, $1::int8 - 1) i) g
			JOIN bench_subjects s ON s.n = g.i / 3 % (SELECT count(*) FROM bench_subjects)`, int64(rows)); err != nil {
			return err
		}
		for _, statement := range []string{`DROP TABLE bench_subjects`, `VACUUM (ANALYZE) ` + table, `CHECKPOINT`} {
			if _, err := conn.Exec(ctx, statement); err != nil {
				return err
			}
		}
		return nil
	})
}

// bytesOf are the sizes of what usage writes to: tables, and their indexes.
func (c *LoadTest) bytesOf(ctx context.Context) (tables, indexes int64, err error) {
	err = c.sql(ctx, func(conn *pgx.Conn) error {
		return conn.QueryRow(ctx, `SELECT sum(pg_table_size(oid))::int8, sum(pg_indexes_size(oid))::int8 FROM pg_class
			WHERE relkind = 'r' AND (relname ~ '^(usage|suspense)_' OR relname IN ('holds', 'postings', 'entries',
			'pending_postings'))`).Scan(&tables, &indexes)
	})
	return tables, indexes, err
}

// written measures what a while of usage writes.
type written struct {
	tables, indexes int64
	use             func() (Use, error)
}

func (c *LoadTest) watchWrites(ctx context.Context) (w written, err error) {
	if w.tables, w.indexes, err = c.bytesOf(ctx); err != nil {
		return w, err
	}
	w.use, err = c.watchUse(ctx)
	return w, err
}

// parts say what the records have cost.
func (w written) parts(ctx context.Context, c *LoadTest, records int64) ([]Part, error) {
	use, err1 := w.use()
	tables, indexes, err2 := c.bytesOf(ctx)
	if err := errors.Join(err1, err2); err != nil {
		return nil, err
	}
	if records == 0 {
		return nil, errors.New("no record was sent")
	}
	return writeParts(use, records, w.tables, tables, w.indexes, indexes), nil
}

func writeParts(use Use, records, tablesBefore, tables, indexesBefore, indexes int64) []Part {
	const mb = 1e6
	return append([]Part{
		{Name: "records", Value: float64(records)},
		{Name: "WAL, MB", Value: use.WALBytes * use.Seconds / mb},
		{Name: "WAL, bytes a record", Value: use.WALBytes * use.Seconds / float64(records)},
		{Name: "tables before, MB", Value: float64(tablesBefore) / mb},
		{Name: "tables grew by, bytes a record", Value: float64(tables-tablesBefore) / float64(records)},
		{Name: "indexes before, MB", Value: float64(indexesBefore) / mb},
		{Name: "indexes grew by, bytes a record", Value: float64(indexes-indexesBefore) / float64(records)},
	}, use.parts()...)
}

// measureLiveUsage has all nodes send usage at the agent's cadence.
func measureLiveUsage(ctx context.Context, e *Env) (_ []Result, err error) {
	nodes, rows := or(e.Params.Nodes, liveNodes), or(e.Params.Rows, filledRows)
	b, err := startBreaking(ctx, e, "usage-live", nodes, or(e.Params.Workloads, workloadsPerNode))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.end()) }()
	b.each = or(e.Params.For, liveFor)
	e.Say("filling %d rows of usage", rows)
	if err := b.fill(ctx, rows); err != nil {
		return nil, err
	}
	members, err := b.membersOf(ctx, nodes, b.workloads)
	if err != nil {
		return nil, err
	}
	w, err := b.watchWrites(ctx)
	if err != nil {
		return nil, err
	}
	var acks Samples
	var records int64
	t, err := b.trial(ctx, func(ctx context.Context) ([]Objective, error) {
		sent, err := b.liveUsage(ctx, members, min(usageCadence, b.each))
		acks, records = sent.Millis, sent.Records
		return usageObjectives(sent, b.each), err
	})
	if err != nil {
		return nil, err
	}
	parts, err := w.parts(ctx, b.LoadTest, records)
	if err := errors.Join(err, b.checkBooks(ctx, records)); err != nil {
		return nil, err
	}
	note := fmt.Sprintf("%d rows of usage before; %d nodes with %d workloads and %d meters cut a segment every %s, one "+
		"after the other, for %s; %d callers; the books are checked afterwards", rows, nodes, b.workloads, len(usageMeters()),
		min(usageCadence, b.each), b.each, len(b.tokens))
	if missed := t.missed(); len(missed) > 0 {
		note += fmt.Sprintf("; missed: %q; limited by %s", missed, t.Use.limit().What)
	}
	ack := acks.Into(Result{
		Name: "usage-live.ack", What: fmt.Sprintf("usage of %d nodes as it arises: cut of a segment → acknowledged, "+
			"which is rated and posted", nodes),
		Unit: "ms", Target: fmt.Sprintf("p99 ≤ %d", maxAckSeconds*1000), Parts: parts, Note: note,
	})
	ack.Reached = len(t.missed()) == 0
	api := t.Calls.Into(Result{
		Name: "usage-live.api", What: fmt.Sprintf("API meanwhile, %d callers", len(b.tokens)), Unit: "ms",
		Target: fmt.Sprintf("p99 ≤ %d", maxAPIMillis),
	})
	api.Reached = api.P99 <= maxAPIMillis
	return []Result{ack, api}, nil
}
