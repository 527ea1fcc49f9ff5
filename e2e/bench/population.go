package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/e2e/bench/swarm"
)

// workloadsPerNode is how many workloads a loaded node has, each with a lease.
const workloadsPerNode = 10

// drainPoll is the interval of queries for rows that the hub has still to change.
const drainPoll = 100 * time.Millisecond

// startLoaded starts a hub with nodes that run workloads: each is an instance with a lease, a hold and a place in an
// allocation, compiled into its node's signed state, accepted by the node and reported as ready.
func startLoaded(ctx context.Context, e *Env, bin, name string, nodes, workloads int) (*LoadTest, error) {
	e.Say("starting a hub with %d nodes of %d workloads", nodes, workloads)
	c, err := startLoadTestOf(ctx, e, bin, name, nodes)
	if err != nil {
		return nil, err
	}
	if _, err := c.connect(ctx, 1); err != nil {
		return nil, err
	}
	if _, err := c.oneMember(ctx); err != nil {
		return nil, fmt.Errorf("the first instance: %w", err)
	}
	if err := c.awaitRunning(ctx); err != nil {
		return nil, err
	}
	if err := c.load(ctx, c.Nodes, workloads); err != nil {
		return nil, fmt.Errorf("instances: %w", err)
	}
	// Memory that enrollment used does not belong to a session.
	if err := c.restartHub(ctx); err != nil {
		return nil, err
	}
	if _, err := c.connectLoaded(ctx, nodes, workloads, 0); err != nil {
		return nil, err
	}
	return c, c.awaitSequenced(ctx)
}

// connectLoaded returns when the first nodes hold sessions and have accepted states with their workloads.
func (c *LoadTest) connectLoaded(ctx context.Context, nodes, workloads int, rtt time.Duration) (swarm.Reply, error) {
	return c.Swarm.Do(ctx, swarm.Command{Connect: &swarm.Connect{Nodes: nodes, Workloads: workloads, RTT: rtt}})
}

// copied are the rows that a running instance has, and what a copy has of its own. The hub numbers the copied events
// and chains the audit rows as if they were new. The first instance's row is t, whose ids are m; x is a row of the
// table bench_new.
func copied() []string {
	const ofAll, ofNodes = "bench_new x", "(SELECT * FROM bench_new WHERE first) x"
	// OFFSET 0 keeps the record from being made once for each of its columns.
	row := func(table, of, own, where string) string {
		return `WITH model AS MATERIALIZED (SELECT t FROM ` + table + ` t, bench_model m WHERE ` + where + `)
			INSERT INTO ` + table + ` SELECT (p).* FROM (SELECT jsonb_populate_record(model.t,
				jsonb_build_object(` + own + `)) AS p FROM model, bench_model m, ` + of + ` OFFSET 0) c`
	}
	return []string{
		row("allocations", ofNodes, `'id', x.allocation, 'node_id', x.node`, `t.id = m.allocation`),
		row("subjects", ofNodes, `'id', x.allocation, 'node_id', x.node, 'allocation_id', x.allocation`,
			`t.id = m.allocation`),
		row("subjects", ofAll, `'id', x.member, 'node_id', x.node, 'app_instance_id', x.instance,
			'allocation_id', x.allocation`, `t.id = m.member`),
		row("holds", ofAll, `'id', x.hold, 'node_id', x.node, 'subject_id', x.member`, `t.subject_id = m.member`),
		row("leases", ofAll, `'hold_id', x.hold, 'node_id', x.node, 'subject_id', x.member`, `t.subject_id = m.member`),
		row("reservations", ofAll, `'member_id', x.member, 'allocation_id', x.allocation`, `t.member_id = m.member`),
		row("app_instances", ofAll, `'id', x.instance, 'display_name', 'loaded',
			'placement_allocation_ids', jsonb_build_array(x.allocation)`, `t.id = m.instance`),
		row("instance_revisions", ofAll, `'instance_id', x.instance`, `t.instance_id = m.instance`),
		row("instance_operations", ofAll, `'id', x.operation, 'instance_id', x.instance`, `t.instance_id = m.instance`),
		row("instance_members", ofAll, `'id', x.member, 'instance_id', x.instance, 'allocation_id', x.allocation,
			'node_id', x.node`, `t.id = m.member`),
		row("member_revisions", ofAll, `'member_id', x.member`, `t.member_id = m.member`),
		row("events", ofAll, `'id', gen_random_uuid(), 'pos', NULL,
			'subject', replace((model.t).subject, m.instance::text, x.instance::text)`,
			`t.subject LIKE '%' || m.instance::text`),
		row("audit_rows", ofAll, `'id', gen_random_uuid(), 'chain', NULL, 'number', NULL, 'previous_hash', NULL, 'hash', NULL,
			'resource_id', x.instance`, `t.resource_id = m.instance::text`),
	}
}

// membersOf are the members of the first nodes, as many as workloads of each.
func (c *LoadTest) membersOf(ctx context.Context, nodes, workloads int) ([][]string, error) {
	byNode := map[string][]string{}
	err := c.sql(ctx, func(conn *pgx.Conn) error {
		rows, err := conn.Query(ctx, `SELECT node_id, array_agg(id::text ORDER BY id) FROM instance_members
			WHERE removed_at IS NULL GROUP BY node_id`)
		if err != nil {
			return err
		}
		var node string
		var members []string
		_, err = pgx.ForEachRow(rows, []any{&node, &members}, func() error {
			byNode[node] = members
			return nil
		})
		return err
	})
	out := make([][]string, nodes)
	for i := range out {
		members := byNode[c.Nodes[i]]
		if len(members) < workloads {
			return nil, errors.Join(err, fmt.Errorf("node %d has %d members", i, len(members)))
		}
		out[i] = members[:workloads]
	}
	return out, err
}

// load inserts workloads instances on each of the nodes. They are copies of the rows of the one instance that the API
// has made, which 100,000 requests would otherwise make at the rate of the row api.
func (c *LoadTest) load(ctx context.Context, nodes []string, workloads int) error {
	return c.sql(ctx, func(conn *pgx.Conn) error {
		if _, err := conn.Exec(ctx, `CREATE TEMP TABLE bench_new (node UUID, allocation UUID, first BOOL, member UUID,
			instance UUID, hold UUID, operation UUID)`); err != nil {
			return err
		}
		var rows [][]any
		for _, node := range nodes {
			allocation := uuid.Must(uuid.NewV7())
			for k := range workloads {
				rows = append(rows, []any{
					uuid.MustParse(node), allocation, k == 0, uuid.Must(uuid.NewV7()), uuid.Must(uuid.NewV7()),
					uuid.Must(uuid.NewV7()), uuid.Must(uuid.NewV7()),
				})
			}
		}
		if _, err := conn.CopyFrom(ctx, pgx.Identifier{"bench_new"},
			[]string{"node", "allocation", "first", "member", "instance", "hold", "operation"},
			pgx.CopyFromRows(rows)); err != nil {
			return err
		}
		return copyRows(ctx, conn)
	})
}

// copyRows makes the instances of bench_new, in one transaction, and has their nodes compiled.
func copyRows(ctx context.Context, conn *pgx.Conn) error {
	tx, err := conn.Begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	if _, err := tx.Exec(ctx, `CREATE TEMP TABLE bench_model ON COMMIT DROP AS SELECT allocation_id AS allocation,
		id AS member, instance_id AS instance FROM instance_members ORDER BY created_at, id LIMIT 1`); err != nil {
		return err
	}
	for _, statement := range copied() {
		if _, err := tx.Exec(ctx, statement); err != nil {
			return fmt.Errorf("%w: %s", err, statement)
		}
	}
	if _, err := tx.Exec(ctx, `INSERT INTO node_intents (node_id, rev) SELECT DISTINCT node, 1 FROM bench_new
		ON CONFLICT (node_id) DO UPDATE SET rev = node_intents.rev + 1`); err != nil {
		return err
	}
	if err := tx.Commit(ctx); err != nil {
		return err
	}
	_, err = conn.Exec(ctx, `DROP TABLE bench_new; ANALYZE allocations, subjects, holds, leases, reservations,
		app_instances, instance_revisions, instance_operations, instance_members, member_revisions, node_intents, events,
		audit_rows`)
	return err
}

// awaitRunning returns when no instance is on its way.
func (c *LoadTest) awaitRunning(ctx context.Context) error {
	return c.awaitNone(ctx, "instances that do not run", `SELECT count(*) FROM app_instances
		WHERE status NOT IN ('running', 'decommissioned')`)
}

// awaitSequenced returns when every event has its position and every audit row its place in the chain.
func (c *LoadTest) awaitSequenced(ctx context.Context) error {
	return errors.Join(
		c.awaitNone(ctx, "events without position", `SELECT count(*) FROM events WHERE pos IS NULL`),
		c.awaitNone(ctx, "audit rows outside the chain", `SELECT count(*) FROM audit_rows WHERE number IS NULL`),
	)
}

// awaitNone polls until a count is zero.
func (c *LoadTest) awaitNone(ctx context.Context, what, query string) error {
	return c.sql(ctx, func(conn *pgx.Conn) error {
		for {
			var left int
			if err := conn.QueryRow(ctx, query).Scan(&left); err != nil || left == 0 {
				return err
			}
			if err := pause(ctx, drainPoll); err != nil {
				return fmt.Errorf("%d %s: %w", left, what, err)
			}
		}
	})
}
