package ledger

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/usagechain"
)

// Watermark is how far the chain of one store is posted without a gap, and how far that is in a verified backup.
type Watermark struct {
	usagechain.Watermark
	// Archived is the last segment in a verified backup.
	Archived uint64
	// BackedUp reports whether the hub has any backup.
	BackedUp bool
}

// Prunable is the last segment that the node may delete: the last posted one where no backup is set up
// (docs/design/metering.md).
func (w Watermark) Prunable() uint64 {
	if w.BackedUp {
		return w.Archived
	}
	return w.Number
}

// Watermarks returns the watermarks of stores; one without posted segments has none.
func Watermarks(ctx context.Context, tx db.Tx, stores ...billing.Store) (map[billing.Store]Watermark, error) {
	return selectWatermarks(ctx, tx, stores, "")
}

// ChainEnd is the last segment of a store that is posted without a gap.
type ChainEnd struct {
	NodeID      string
	Incarnation string
	Number      uint64
}

// ChainEnds returns the ends of all chains, for a backup.
func ChainEnds(ctx context.Context, tx db.Tx) ([]ChainEnd, error) {
	return db.Select(ctx, tx, pgx.RowToStructByPos[ChainEnd],
		`SELECT node_id, incarnation, number FROM usage_watermarks WHERE number > 0 ORDER BY node_id, incarnation`)
}

// SetArchived records that usage up to these segments is in a verified backup: nodes may delete it.
func SetArchived(ctx context.Context, tx db.Tx, ends []ChainEnd) error {
	stores, numbers := make([]billing.Store, len(ends)), make([]int64, len(ends))
	for i, e := range ends {
		stores[i], numbers[i] = billing.Store{NodeID: e.NodeID, Incarnation: e.Incarnation}, int64(e.Number)
	}
	nodes, incarnations := storeColumns(stores)
	_, err := tx.Exec(ctx, `UPDATE usage_watermarks AS w SET archived = x.number
		FROM unnest($1::uuid[], $2::text[], $3::int8[]) AS x(node, incarnation, number)
		WHERE w.node_id = x.node AND w.incarnation = x.incarnation AND w.archived < x.number`, nodes, incarnations, numbers)
	return err
}

// chain is what is posted of one store.
type chain struct {
	watermark Watermark
	// ahead are the segments posted beyond a gap.
	ahead map[uint64]usagechain.Link
	// added are the segments that this transaction posts.
	added []usagechain.Link
	// misnumbered are segments of this batch that are set aside after it; those behind them continue their numbers.
	misnumbered map[uint64]usagechain.Link
}

// accept checks a segment and advances the watermark; isNew is false for one that was posted before. An error that is
// no protocol.RefusalError is permanent: the record numbers do not continue those of the neighbours, and the segment
// has to be set aside.
func (c *chain) accept(at usagechain.Link) (isNew bool, err error) {
	known, err := c.watermark.Check(c.ahead, at)
	if err != nil || known {
		return false, err
	}
	near := c.ahead
	if len(c.misnumbered) > 0 {
		near = maps.Clone(c.ahead)
		maps.Copy(near, c.misnumbered)
	}
	at, err = c.watermark.CheckRecords(near, at)
	if err != nil {
		if c.misnumbered == nil {
			c.misnumbered = map[uint64]usagechain.Link{}
		}
		c.misnumbered[at.Number] = at
		return false, err
	}
	c.add(at)
	return true, nil
}

// skip accepts a segment that is set aside: whatever its record numbers are, they count as passed.
func (c *chain) skip(at usagechain.Link) (isNew bool, err error) {
	known, err := c.watermark.Check(c.ahead, at)
	if err != nil || known {
		return false, err
	}
	at, _ = c.watermark.CheckRecords(c.ahead, at)
	c.add(at)
	return true, nil
}

func (c *chain) add(at usagechain.Link) {
	c.ahead[at.Number] = at
	c.added = append(c.added, at)
	c.watermark.Watermark = c.watermark.Advance(c.ahead)
}

// lockChains loads the chains of the segments' stores and locks their watermarks, in one order. It is the only lock on
// a store, and comes before the first read of it.
func lockChains(ctx context.Context, tx db.Tx, segments []Segment, now time.Time) (map[billing.Store]*chain, error) {
	stores := make([]billing.Store, len(segments))
	for i, s := range segments {
		stores[i] = s.Store
	}
	slices.SortFunc(stores, func(a, b billing.Store) int {
		return cmp.Or(strings.Compare(a.NodeID, b.NodeID), strings.Compare(a.Incarnation, b.Incarnation))
	})
	stores = slices.Compact(stores)
	nodes, incarnations := storeColumns(stores)
	if err := tx.Queue(ctx, `INSERT INTO usage_watermarks (node_id, incarnation, number, sha256, last_record, updated_at)
		SELECT x.node, x.incarnation, 0, ''::bytea, 0, $3::timestamptz
		FROM unnest($1::uuid[], $2::text[]) AS x(node, incarnation)
		ON CONFLICT (node_id, incarnation) DO NOTHING`, nodes, incarnations, now); err != nil {
		return nil, err
	}
	locked, err := selectWatermarks(ctx, tx, stores, ` FOR UPDATE OF w`)
	if err != nil {
		return nil, err
	}
	chains := make(map[billing.Store]*chain, len(locked))
	for s, w := range locked {
		chains[s] = &chain{watermark: w, ahead: map[uint64]usagechain.Link{}}
	}
	var s billing.Store
	var l usagechain.Link
	into := []any{&s.NodeID, &s.Incarnation, &l.Number, &l.SHA256, &l.Previous, &l.First, &l.Last}
	err = db.ForEach(ctx, tx, into, func() {
		chains[s].ahead[l.Number] = l
	}, `SELECT a.node_id, a.incarnation, a.number, a.sha256, a.previous_sha256, a.first_record, a.last_record
		FROM unnest($1::uuid[], $2::text[]) AS x(node, incarnation)
		JOIN usage_ahead a ON a.node_id = x.node AND a.incarnation = x.incarnation`, nodes, incarnations)
	return chains, err
}

func selectWatermarks(ctx context.Context, tx db.Tx, stores []billing.Store, lock string,
) (map[billing.Store]Watermark, error) {
	nodes, incarnations := storeColumns(stores)
	out := make(map[billing.Store]Watermark, len(stores))
	var s billing.Store
	var w Watermark
	into := []any{&s.NodeID, &s.Incarnation, &w.Number, &w.SHA256, &w.LastRecord, &w.Archived, &w.BackedUp}
	err := db.ForEach(ctx, tx, into, func() {
		out[s] = w
	}, `SELECT w.node_id, w.incarnation, w.number, w.sha256, w.last_record, w.archived, EXISTS (SELECT 1 FROM backups)
		FROM unnest($1::uuid[], $2::text[]) AS x(node, incarnation)
		JOIN usage_watermarks w ON w.node_id = x.node AND w.incarnation = x.incarnation
		ORDER BY w.node_id, w.incarnation`+lock, nodes, incarnations)
	return out, err
}

// saveChains writes the watermarks of the chains that have new segments, also of one that only has new segments beyond
// a gap: a serializable transaction that waited for the lock then starts afresh instead of missing them.
func saveChains(ctx context.Context, tx db.Tx, chains map[billing.Store]*chain, now time.Time) error {
	type aheadRow struct {
		billing.Store
		usagechain.Link
	}
	var stores []billing.Store
	var ahead []aheadRow
	for s, c := range chains {
		if len(c.added) == 0 {
			continue
		}
		stores = append(stores, s)
		for _, l := range c.added {
			if l.Number > c.watermark.Number {
				ahead = append(ahead, aheadRow{s, l})
			}
		}
	}
	if len(stores) == 0 {
		return nil
	}
	columns := columnsOf(stores, func(s billing.Store) []any {
		w := chains[s].watermark
		return []any{id(s.NodeID), s.Incarnation, int64(w.Number), w.SHA256, int64(w.LastRecord)}
	})
	if err := tx.Queue(ctx, `UPDATE usage_watermarks AS w
		SET number = x.number, sha256 = x.sha256, last_record = x.last, updated_at = $6
		FROM unnest($1::uuid[], $2::text[], $3::int8[], $4::bytea[], $5::int8[])
			AS x(node, incarnation, number, sha256, last)
		WHERE w.node_id = x.node AND w.incarnation = x.incarnation`, append(columns, now)...); err != nil {
		return err
	}
	if err := tx.Queue(ctx,
		`DELETE FROM usage_ahead WHERE (node_id, incarnation, number) IN (SELECT a.node_id, a.incarnation, a.number
		FROM unnest($1::uuid[], $2::text[], $3::int8[]) AS x(node, incarnation, number)
		JOIN usage_ahead a ON a.node_id = x.node AND a.incarnation = x.incarnation AND a.number <= x.number)`,
		columns[:3]...); err != nil {
		return err
	}
	if len(ahead) == 0 {
		return nil
	}
	columns = columnsOf(ahead, func(a aheadRow) []any {
		return []any{
			id(a.NodeID), a.Incarnation, int64(a.Number), a.SHA256, a.Previous, int64(a.First), int64(a.Last),
		}
	})
	return tx.Queue(ctx, `INSERT INTO usage_ahead
			(node_id, incarnation, number, sha256, previous_sha256, first_record, last_record, posted_at)
		SELECT x.*, $8::timestamptz
		FROM unnest($1::uuid[], $2::text[], $3::int8[], $4::bytea[], $5::bytea[], $6::int8[], $7::int8[]) AS x`,
		append(columns, now)...)
}

func storeColumns(stores []billing.Store) (nodes []pgtype.UUID, incarnations []string) {
	for _, s := range stores {
		nodes, incarnations = append(nodes, id(s.NodeID)), append(incarnations, s.Incarnation)
	}
	return nodes, incarnations
}
