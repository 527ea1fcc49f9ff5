package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/bench/swarm"
	"github.com/gpuaas/gpuaas/pkg/appkit"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/protocol"
)

// The usage that the nodes upload, as after an outage of the hub.
const (
	usageNodes     = 100
	membersPerNode = 20
	// cut is the agent's default, cuts come to 45 minutes; with three meters a segment has 60 records.
	cut  = 30 * time.Second
	cuts = 90
	// repeatEvery: one segment in ten arrives twice.
	repeatEvery = 10
	// batchRows is the number of rows of one plain insert.
	batchRows = 1000
)

// usageMeters are what an agent measures; the first two have a price.
func usageMeters() []string {
	return []string{protocol.MeterSessionSeconds, protocol.MeterCPUSeconds, protocol.MeterMemoryByteSeconds}
}

// measureUsage lets nodes upload usage and compares its rate with a plain insert of the resulting rows.
func measureUsage(ctx context.Context, e *Env) ([]Result, error) {
	return measureUploads(ctx, e, "hub-usage", usageNodes, 0)
}

// measureUploads lets nodes upload usage of three quarters of an hour into a table with so many rows.
func measureUploads(ctx context.Context, e *Env, name string, nodes, filled int) (results []Result, err error) {
	const minRate = 30_000
	c, err := startLoadTest(ctx, e, name, nodes)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.end()) }()
	if _, err := c.connect(ctx, nodes); err != nil {
		return nil, err
	}
	from := time.Now().Add(-time.Duration(cuts)*cut - time.Minute).Truncate(time.Second)
	members, err := c.members(ctx, from.Add(-time.Minute))
	if err != nil {
		return nil, fmt.Errorf("members: %w", err)
	}
	if filled > 0 {
		e.Say("filling %d rows of usage", filled)
		if err := c.fill(ctx, filled); err != nil {
			return nil, err
		}
	}
	if _, err := c.Swarm.Do(ctx, swarm.Command{Seal: &swarm.Seal{
		Members: members, Meters: usageMeters(), From: from,
		Cut: cut, Cuts: e.Samples(cuts),
	}}); err != nil {
		return nil, err
	}
	before, err := c.cpu()
	if err != nil {
		return nil, err
	}
	sent, parts, err := c.uploadAll(ctx)
	if err != nil {
		return nil, err
	}
	after, err := c.cpu()
	if err != nil {
		return nil, err
	}
	if err := c.checkBooks(ctx, sent.Records); err != nil {
		return nil, err
	}
	plain, err := c.plainInsert(ctx)
	if err != nil {
		return nil, fmt.Errorf("plain insert: %w", err)
	}
	rate := float64(sent.Records) / sent.Seconds
	r := Result{
		Name: name, What: fmt.Sprintf("usage of %d nodes, signed, through their sessions: rated and posted", nodes),
		Unit:   "records/s",
		Target: fmt.Sprintf("≥ %d", minRate), Reached: rate >= minRate,
		Parts: append([]Part{
			{Name: "rows before", Value: float64(filled)},
			{Name: "sent twice", Value: float64(sent.Repeated)},
			{Name: "seconds", Value: sent.Seconds},
			{Name: "hub core-s", Value: (after[0] - before[0]).Seconds()},
			{Name: "PostgreSQL core-s", Value: (after[1] - before[1]).Seconds()},
			{Name: "simulated nodes core-s", Value: (after[2] - before[2]).Seconds()},
		}, parts...),
		Note: fmt.Sprintf("segments of %d records (%d members, 3 meters, 2 of them priced, a cut every 30 s), 16 under way "+
			"for each node; records are counted once; "+
			"baseline: INSERT … SELECT unnest … ON CONFLICT DO NOTHING of the same rows into a table with a primary key, "+
			"%d at once, on one connection", membersPerNode*len(usageMeters()), membersPerNode, batchRows),
	}
	return []Result{r.single(rate).against(plain)}, nil
}

// uploadAll has the nodes send what they have sealed; parts say what that has written.
func (c *LoadTest) uploadAll(ctx context.Context) (sent swarm.Reply, parts []Part, err error) {
	w, err := c.watchWrites(ctx)
	if err != nil {
		return sent, nil, err
	}
	if sent, err = c.Swarm.Do(ctx, swarm.Command{Upload: &swarm.Upload{RepeatEvery: repeatEvery}}); err != nil {
		return sent, nil, err
	}
	parts, err = w.parts(ctx, c, sent.Records)
	return sent, parts, err
}

// cpu is the CPU time of hub, database and simulated nodes so far.
func (c *LoadTest) cpu() ([3]time.Duration, error) {
	hub, err1 := cpuTime(c.Hub.PID)
	database, err2 := c.databaseCPU()
	nodes, err3 := cpuTime(c.Swarm.PID)
	return [3]time.Duration{hub, database, nodes}, errors.Join(err1, err2, err3)
}

// members inserts the members of each node, leased since the given time. They are copies of the rows of one instance
// that is created through the API.
func (c *LoadTest) members(ctx context.Context, since time.Time) ([][]string, error) {
	id, err := c.oneMember(ctx)
	if err != nil {
		return nil, err
	}
	members := make([][]string, len(c.Nodes))
	var ids, nodes, instances, holds []uuid.UUID
	for i, node := range c.Nodes {
		for range membersPerNode {
			member := uuid.New()
			members[i] = append(members[i], member.String())
			ids, nodes = append(ids, member), append(nodes, uuid.MustParse(node))
			instances, holds = append(instances, uuid.New()), append(holds, uuid.New())
		}
	}
	err = c.sql(ctx, func(conn *pgx.Conn) error {
		const all = `unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::uuid[]) AS x(id, node, instance, hold)`
		for _, statement := range []string{
			`INSERT INTO holds SELECT (jsonb_populate_record(t, jsonb_build_object('id', x.hold, 'node_id', x.node,
				'subject_id', x.id,
				'placed_nanos', 1000000000000))).*
				FROM holds t, ` + all +
				` WHERE t.subject_id = $5 AND x.instance IS NOT NULL AND $6::timestamptz IS NOT NULL`,
			`INSERT INTO leases SELECT (jsonb_populate_record(t, jsonb_build_object('subject_id', x.id, 'node_id', x.node,
				'hold_id', x.hold, 'issued_at', $6::timestamptz))).*
				FROM leases t, ` + all + ` WHERE t.subject_id = $5 AND x.instance IS NOT NULL`,
			`INSERT INTO subjects SELECT (jsonb_populate_record(t, jsonb_build_object('id', x.id, 'node_id', x.node,
				'app_instance_id', x.instance, 'opened_at', $6::timestamptz))).*
				FROM subjects t, ` + all + ` WHERE t.id = $5 AND x.hold IS NOT NULL`,
		} {
			if _, err := conn.Exec(ctx, statement, ids, nodes, instances, holds, id, since); err != nil {
				return err
			}
		}
		// Not the tables that are empty yet: a plan for an empty table would stay for the whole run.
		_, err := conn.Exec(ctx, `ANALYZE holds, leases, subjects`)
		return err
	})
	return members, err
}

// oneMember makes an instance with two prices in force and returns the id of its member.
func (c *LoadTest) oneMember(ctx context.Context) (string, error) {
	image, err := appkit.ImageFromFiles([]appkit.File{{Path: "/app", Content: []byte("never run"), Mode: 0o755}},
		appkit.ImageConfig{Entrypoint: []string{"/app"}, User: "1000:1000"})
	if err != nil {
		return "", err
	}
	publisher, err := c.Tenant.NewPublisher(ctx)
	if err != nil {
		return "", err
	}
	if _, err := c.Tenant.Ship(ctx, publisher, scenario.Release{
		AppSlug: appSlug, Version: appVersion, Image: image,
		Template: appManifest,
	}); err != nil {
		return "", err
	}
	if err := errors.Join(c.Tenant.Entitle(ctx, appSlug), c.Tenant.Price(ctx, appSlug, price)); err != nil {
		return "", err
	}
	if _, err := client.Read[client.Price](c.Tenant.Admin.CreatePrice(ctx, client.PriceCreate{
		Meter: protocol.MeterCPUSeconds, AppSlug: appSlug, Currency: scenario.Currency, Price: "0.12",
		Per: client.PriceUnitHour,
	})); err != nil {
		return "", err
	}
	allocation, err := c.Tenant.Allocate(ctx, c.Tenant.Admin, c.Nodes[0], 4, 4096)
	if err != nil {
		return "", err
	}
	i, err := client.Read[client.AppInstance](c.Tenant.Admin.CreateAppInstance(ctx, c.Tenant.Project.ID,
		client.AppInstanceCreate{
			AppSlug: appSlug, Version: appVersion, DisplayName: "first", PlacementIntent: client.PlacementIntent{
				AllocationIds: []string{allocation.ID},
			},
		}))
	if err != nil {
		return "", err
	}
	if len(i.Members) != 1 {
		return "", fmt.Errorf("the instance has %d members", len(i.Members))
	}
	return i.Members[0].ID, nil
}

// checkBooks compares what is in the books with what was sent.
func (c *LoadTest) checkBooks(ctx context.Context, records int64) error {
	return c.sql(ctx, func(conn *pgx.Conn) error {
		for _, check := range []struct {
			what, query string
			want        int64
		}{
			{
				"usage records",
				`SELECT count(*) FROM usage_recent WHERE meter <> 'allocation_seconds' AND run_id <> '` + filledRun + `'`,
				records,
			},
			{"records in suspense", `SELECT count(*) FROM suspense_records`, 0},
			{
				"priced records without a posting",
				`SELECT count(*) FROM usage_recent WHERE posting_id IS NULL
					AND meter NOT IN ('memory_byte_seconds', 'allocation_seconds')`, 0,
			},
			{
				"postings that do not sum to zero",
				`SELECT count(*) FROM (SELECT posting_id FROM entries GROUP BY posting_id HAVING sum(amount_nanos) <> 0) x`, 0,
			},
			{
				"accruals that are not their records", `SELECT count(*) FROM (SELECT subject_id, meter, sum(quantity) AS q
					FROM usage_hours GROUP BY subject_id, meter) a
				JOIN (SELECT subject_id, meter, sum(quantity) AS q FROM usage_recent
				WHERE run_id <> '` + filledRun + `' GROUP BY subject_id, meter) u USING (subject_id, meter) WHERE a.q <> u.q`, 0,
			},
		} {
			var got int64
			if err := conn.QueryRow(ctx, check.query).Scan(&got); err != nil {
				return err
			}
			if got != check.want {
				return fmt.Errorf("%d %s, expected %d", got, check.what, check.want)
			}
		}
		return nil
	})
}

// plainInsert is how many of the same rows a second a plain table takes.
func (c *LoadTest) plainInsert(ctx context.Context) (rate float64, err error) {
	err = c.sql(ctx, func(conn *pgx.Conn) error {
		for _, statement := range []string{
			`CREATE TABLE bench_plain (LIKE usage_records_0)`, `ALTER TABLE bench_plain ADD PRIMARY KEY (id)`,
		} {
			if _, err := conn.Exec(ctx, statement); err != nil {
				return err
			}
		}
		columns, err := columnsOf(ctx, conn)
		if err != nil {
			return err
		}
		rows, err := readColumns(ctx, conn, columns)
		if err != nil {
			return err
		}
		statement := plainStatement(columns)
		start, done := time.Now(), 0
		for at := 0; at < len(rows[0]); at += batchRows {
			end := min(at+batchRows, len(rows[0]))
			args := make([]any, len(columns))
			for k := range columns {
				args[k] = columns[k].array(rows[k][at:end])
			}
			if _, err := conn.Exec(ctx, statement, args...); err != nil {
				return err
			}
			done = end
		}
		rate = float64(done) / time.Since(start).Seconds()
		return nil
	})
	return rate, err
}

// column of the plain table.
type column struct{ Name, Kind string }

func columnsOf(ctx context.Context, conn *pgx.Conn) ([]column, error) {
	rows, err := conn.Query(ctx,
		`SELECT column_name, udt_name FROM information_schema.columns WHERE table_name = 'usage_records_0'
			ORDER BY ordinal_position`)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[column])
}

// array types the values, so that they travel in binary.
func (c column) array(values []any) any {
	switch c.Kind {
	case "uuid":
		return typed[[16]byte](values)
	case "int8":
		return typed[int64](values)
	case "timestamptz":
		return typed[time.Time](values)
	default:
		return typed[string](values)
	}
}

// typed keeps NULL as nil.
func typed[T any](values []any) []*T {
	out := make([]*T, len(values))
	for i, v := range values {
		if t, ok := v.(T); ok {
			out[i] = &t
		}
	}
	return out
}

func plainStatement(columns []column) string {
	arrays := make([]string, len(columns))
	for i, c := range columns {
		arrays[i] = fmt.Sprintf("$%d::%s[]", i+1, c.Kind)
	}
	return "INSERT INTO bench_plain SELECT * FROM unnest(" + strings.Join(arrays, ", ") + ") ON CONFLICT DO NOTHING"
}

// plainLimit bounds how many rows are copied.
const plainLimit = 200_000

// readColumns gives the rows that were posted, column by column.
func readColumns(ctx context.Context, conn *pgx.Conn, columns []column) ([][]any, error) {
	rows, err := conn.Query(ctx, fmt.Sprintf(`SELECT * FROM usage_recent WHERE run_id <> '%s' ORDER BY id LIMIT %d`,
		filledRun, plainLimit))
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	out := make([][]any, len(columns))
	for rows.Next() {
		values, err := rows.Values()
		if err != nil {
			return nil, err
		}
		for k, v := range values {
			out[k] = append(out[k], v)
		}
	}
	return out, rows.Err()
}
