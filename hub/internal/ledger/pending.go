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
	"github.com/gpuaas/gpuaas/hub/rating"
)

// Usage draws on its hold at once. The journal follows with one posting for each subject, meter and price in a posting
// interval, and when the subject is settled: a posting for each segment would make a journal of terabytes a year.

type pendingKey struct{ subjectID, meter, priceID string }

func (k pendingKey) compare(o pendingKey) int {
	return cmp.Or(strings.Compare(k.subjectID, o.subjectID), strings.Compare(k.meter, o.meter),
		strings.Compare(k.priceID, o.priceID))
}

// pendingPosting is what the journal does not have yet of one subject, meter and price.
type pendingPosting struct {
	// posting is the id that the posting will have.
	posting  pgtype.UUID
	currency string
	// hours are those that it is for; since is when the first usage of it came.
	hours rating.Interval
	since time.Time
	rating.Delta
	changed bool
}

// addPending adds what one hour's charge has changed, and returns the id of its posting to come; not valid where there
// is none.
func addPending(all map[pendingKey]*pendingPosting, k billing.AccrualKey, currency string, d rating.Delta,
	now time.Time,
) (posting pgtype.UUID) {
	key := pendingKey{k.MemberID, k.Meter, k.PriceID}
	u := all[key]
	if u == nil {
		if d.Zero() {
			return posting
		}
		u = &pendingPosting{
			posting: id(db.NewID()), currency: currency, hours: rating.Interval{From: k.Hour, To: k.Hour},
			since: now,
		}
		all[key] = u
	}
	if d.Zero() {
		return u.posting
	}
	u.CollectedNanos += d.CollectedNanos
	u.WrittenOffNanos += d.WrittenOffNanos
	u.HostNanos += d.HostNanos
	u.hours.From, u.hours.To = earliest(u.hours.From, k.Hour), latest(u.hours.To, k.Hour.Add(time.Hour))
	u.changed = true
	return u.posting
}

// PendingPostings lists subjects of which usage waits for the journal since before a moment in order of when it came,
// from the one after a given on.
func PendingPostings(ctx context.Context, tx db.Tx, after Pending, before time.Time, limit int) ([]Pending, error) {
	return db.Select(ctx, tx, pgx.RowToStructByPos[Pending],
		`SELECT DISTINCT s.id, s.org_id, s.node_id, p.since FROM pending_postings p JOIN subjects s ON s.id = p.subject_id
		WHERE (p.since, p.subject_id) > ($1, $2) AND p.since < $3
		ORDER BY p.since, s.id LIMIT $4`, after.Since, orFirst(after.ID), before, limit)
}

// Pending is a subject with usage that waits for the journal.
type Pending struct {
	Row
	Since time.Time
}

// PostPending writes the postings of a subject's usage that the journal does not have yet.
func PostPending(ctx context.Context, tx db.Tx, subjectID string, now time.Time) error {
	s, err := lockSubject(ctx, tx, subjectID)
	if err != nil {
		return err
	}
	return postPending(ctx, tx, s, now)
}

// PutOffPending makes a subject's pending postings due again as if their usage had come now.
func PutOffPending(ctx context.Context, tx db.Tx, subjectID string, now time.Time) error {
	return tx.Queue(ctx, `UPDATE pending_postings p SET since = $2 FROM subjects s
		WHERE s.id = $1 AND p.node_id = s.node_id AND p.subject_id = s.id`, subjectID, now)
}

func postPending(ctx context.Context, tx db.Tx, s subject, now time.Time) error {
	all, err := pendingOf(ctx, tx, []*subject{&s})
	if err != nil || len(all) == 0 {
		return err
	}
	h, _, err := holdOf(ctx, tx, s)
	if err != nil {
		return err
	}
	var postings []Posting
	for _, k := range slices.SortedFunc(maps.Keys(all), pendingKey.compare) {
		made, err := all[k].postings(s, h, k, now)
		if err != nil {
			return err
		}
		postings = append(postings, made...)
	}
	if err := tx.Queue(ctx, `DELETE FROM pending_postings WHERE node_id = $1 AND subject_id = $2`, s.NodeID,
		s.ID); err != nil {
		return err
	}
	return insertPostings(ctx, tx, postings...)
}

// postings are what the hold paid, shared with the host, and what was written off.
func (u *pendingPosting) postings(s subject, h hold, k pendingKey, now time.Time) (out []Posting, err error) {
	key := "usage:" + u.posting.String()
	paid, writtenOff := billing.UsageLegs(h.id, s.NodeID, u.currency, u.Delta)
	if len(paid) > 0 {
		p, err := NewPosting(key, paid...)
		if err != nil {
			return nil, err
		}
		p.ID = u.posting.String()
		out = append(out, p.of(Usage, s, now).over(k.meter, k.priceID, u.hours))
	}
	if len(writtenOff) > 0 {
		p, err := NewPosting(key+":write_off", writtenOff...)
		if err != nil {
			return nil, err
		}
		if len(out) == 0 {
			p.ID = u.posting.String()
		}
		out = append(out, p.of(WriteOff, s, now).over(k.meter, k.priceID, u.hours))
	}
	return out, nil
}

func pendingOf(ctx context.Context, tx db.Tx, subjects []*subject) (map[pendingKey]*pendingPosting, error) {
	out := map[pendingKey]*pendingPosting{}
	nodes, ids := keysOf(subjects)
	var (
		k pendingKey
		u pendingPosting
	)
	into := []any{
		&k.subjectID, &k.meter, &k.priceID, &u.posting, &u.currency, &u.hours.From, &u.hours.To, &u.CollectedNanos,
		&u.WrittenOffNanos, &u.HostNanos, &u.since,
	}
	err := db.ForEach(ctx, tx, into, func() { out[k] = new(u) },
		`SELECT p.subject_id, p.meter, p.price_id, p.posting_id, p.currency, p.from_hour, p.to_hour,
			p.collected_nanos, p.written_off_nanos, p.host_nanos, p.since
		FROM unnest($1::uuid[], $2::uuid[]) AS x(node, subject)
		JOIN pending_postings p ON p.node_id = x.node AND p.subject_id = x.subject`, nodes, ids)
	return out, err
}

func savePending(ctx context.Context, tx db.Tx, of map[string]*subject,
	all map[pendingKey]*pendingPosting,
) error {
	keys := slices.SortedFunc(maps.Keys(all), pendingKey.compare)
	keys = slices.DeleteFunc(keys, func(k pendingKey) bool { return !all[k].changed })
	if len(keys) == 0 {
		return nil
	}
	columns := columnsOf(keys, func(k pendingKey) []any {
		s, u := of[k.subjectID], all[k]
		return []any{
			id(s.NodeID), s.uuid(), k.meter, id(k.priceID), u.posting, u.currency, u.hours.From, u.hours.To,
			u.CollectedNanos, u.WrittenOffNanos, u.HostNanos, u.since,
		}
	})
	_, err := tx.Exec(ctx,
		`INSERT INTO pending_postings (node_id, subject_id, meter, price_id, posting_id, currency, from_hour, to_hour,
			collected_nanos, written_off_nanos, host_nanos, since)
		SELECT x.* FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::uuid[], $5::uuid[], $6::text[], $7::timestamptz[],
			$8::timestamptz[], $9::int8[], $10::int8[], $11::int8[], $12::timestamptz[]) AS x
		ON CONFLICT (node_id, subject_id, meter, price_id) DO UPDATE
		SET from_hour = excluded.from_hour, to_hour = excluded.to_hour,
			collected_nanos = excluded.collected_nanos, written_off_nanos = excluded.written_off_nanos,
			host_nanos = excluded.host_nanos`,
		columns...)
	return err
}
