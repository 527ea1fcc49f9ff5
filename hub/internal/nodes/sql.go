package nodes

import (
	"context"
	"fmt"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/usagechain"
)

func watermarkOf(ctx context.Context, tx db.Tx, nodeID, incarnation string) (m watermark, err error) {
	err = tx.QueryRow(ctx,
		`SELECT number, sha256, archived, EXISTS (SELECT 1 FROM backups) FROM usage_watermarks WHERE node_id = $1
			AND incarnation = $2`, nodeID, incarnation).
		Scan(&m.Number, &m.SHA256, &m.archived, &m.backedUp)
	if db.IsNoRows(err) {
		return watermark{}, nil
	}
	return m, err
}

// watermarksOf is watermarkOf for many stores; those that it does not name are at their beginning.
func watermarksOf(ctx context.Context, tx db.Tx, stores []store) (map[store]watermark, error) {
	nodes, incarnations := columns(stores)
	rows, err := tx.Query(ctx,
		`SELECT m.node_id, m.incarnation, m.number, m.sha256, m.archived, EXISTS (SELECT 1 FROM backups)
		FROM unnest($1::uuid[], $2::text[]) AS x(node, incarnation) JOIN usage_watermarks m ON m.node_id = x.node
		AND m.incarnation = x.incarnation`, nodes, incarnations)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	out := map[store]watermark{}
	for rows.Next() {
		var s store
		var m watermark
		if err := rows.Scan(&s.nodeID, &s.incarnation, &m.Number, &m.SHA256, &m.archived, &m.backedUp); err != nil {
			return nil, err
		}
		out[s] = m
	}
	return out, rows.Err()
}

// columns of the stores of a batch, which are in order.
func columns(stores []store) (nodes, incarnations []string) {
	for _, s := range stores {
		nodes, incarnations = append(nodes, s.nodeID), append(incarnations, s.incarnation)
	}
	return nodes, incarnations
}

// lockWatermarks locks the stores' rows first. It is the only lock on a node's usage: two batches with a store in
// common run one after the other.
func lockWatermarks(ctx context.Context, tx db.Tx, stores []store, now time.Time) (map[store]*chain, error) {
	nodes, incarnations := columns(stores)
	if err := tx.Queue(ctx, `INSERT INTO usage_watermarks (node_id, incarnation, number, sha256, updated_at)
		SELECT x.node, x.incarnation, 0, ''::bytea, $3::timestamptz
		FROM unnest($1::uuid[], $2::text[]) AS x(node, incarnation)
		ON CONFLICT (node_id, incarnation) DO NOTHING`, nodes, incarnations, now); err != nil {
		return nil, err
	}
	rows, err := tx.Query(ctx,
		`SELECT m.node_id, m.incarnation, m.number, m.sha256, m.archived, EXISTS (SELECT 1 FROM backups),
			m.last_record
		FROM unnest($1::uuid[], $2::text[]) AS x(node, incarnation)
		JOIN usage_watermarks m ON m.node_id = x.node AND m.incarnation = x.incarnation ORDER BY m.node_id, m.incarnation
		FOR UPDATE OF m`, nodes, incarnations)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	out := map[store]*chain{}
	for rows.Next() {
		var s store
		c := &chain{ahead: map[uint64]usagechain.Link{}}
		if err := rows.Scan(
			&s.nodeID, &s.incarnation, &c.watermark.Number, &c.watermark.SHA256, &c.watermark.archived, &c.watermark.backedUp,
			&c.watermark.LastRecord,
		); err != nil {
			return nil, err
		}
		c.stored, out[s] = c.watermark, c
	}
	return out, rows.Err()
}

func loadAhead(ctx context.Context, tx db.Tx, stores []store, chains map[store]*chain) error {
	nodes, incarnations := columns(stores)
	rows, err := tx.Query(ctx,
		`SELECT a.node_id, a.incarnation, a.number, a.sha256, a.previous_sha256, a.first_record, a.last_record
		FROM unnest($1::uuid[], $2::text[]) AS x(node, incarnation)
		JOIN usage_ahead a ON a.node_id = x.node AND a.incarnation = x.incarnation`, nodes, incarnations)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var s store
		var l usagechain.Link
		if err := rows.Scan(&s.nodeID, &s.incarnation, &l.Number, &l.SHA256, &l.Previous, &l.First, &l.Last); err != nil {
			return err
		}
		chains[s].ahead[l.Number] = l
	}
	return rows.Err()
}

// saveChains saves the watermarks that moved and the segments posted beyond a gap.
func saveChains(ctx context.Context, tx db.Tx, stores []store, chains map[store]*chain, now time.Time) error {
	var moved, beyond []store
	var numbers, lasts, aheadNumbers, aheadFirsts, aheadLasts []int64
	var digests, aheadDigests, aheadPrevious [][]byte
	for _, s := range stores {
		c := chains[s]
		if c.watermark.Number != c.stored.Number {
			moved, numbers, digests = append(moved, s), append(numbers, int64(c.watermark.Number)),
				append(digests, c.watermark.SHA256)
			lasts = append(lasts, int64(c.watermark.LastRecord))
		}
		for _, l := range c.added {
			if l.Number > c.watermark.Number {
				beyond, aheadNumbers = append(beyond, s), append(aheadNumbers, int64(l.Number))
				aheadDigests, aheadPrevious = append(aheadDigests, l.SHA256), append(aheadPrevious, l.Previous)
				aheadFirsts, aheadLasts = append(aheadFirsts, int64(l.First)), append(aheadLasts, int64(l.Last))
			}
		}
	}
	if len(moved) > 0 {
		nodes, incarnations := columns(moved)
		if err := tx.Queue(ctx, `UPDATE usage_watermarks SET number = x.number, sha256 = x.sha256, updated_at = $6,
				last_record = x.last
			FROM unnest($1::uuid[], $2::text[], $3::int8[], $4::bytea[], $5::int8[]) AS x(node, incarnation, number, sha256,
			last)
			WHERE usage_watermarks.node_id = x.node AND usage_watermarks.incarnation = x.incarnation`,
			nodes, incarnations, numbers, digests, lasts, now); err != nil {
			return err
		}
		if err := tx.Queue(ctx,
			`DELETE FROM usage_ahead WHERE (node_id, incarnation, number) IN (SELECT a.node_id, a.incarnation, a.number
			FROM unnest($1::uuid[], $2::text[], $3::int8[]) AS x(node, incarnation, number)
			JOIN usage_ahead a ON a.node_id = x.node AND a.incarnation = x.incarnation AND a.number <= x.number)`, nodes,
			incarnations, numbers); err != nil {
			return fmt.Errorf("delete what the watermark has passed: %w", err)
		}
	}
	if len(beyond) == 0 {
		return nil
	}
	nodes, incarnations := columns(beyond)
	return tx.Queue(ctx, `INSERT INTO usage_ahead
			(node_id, incarnation, number, sha256, previous_sha256, first_record, last_record, posted_at)
		SELECT x.*, $8::timestamptz
		FROM unnest($1::uuid[], $2::text[], $3::int8[], $4::bytea[], $5::bytea[], $6::int8[], $7::int8[]) AS x`,
		nodes, incarnations, aheadNumbers, aheadDigests, aheadPrevious, aheadFirsts, aheadLasts, now)
}
