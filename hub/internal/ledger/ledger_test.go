package ledger_test

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

var noon = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

const incarnation = "i1"

// world is one database with an org, a node and what the tests put there.
type world struct {
	t    testing.TB
	d    *db.DB
	org  string
	proj string
	node string
	now  time.Time
	seq  uint64
	keys int
}

func newWorld(t testing.TB) *world {
	return &world{t: t, d: dbtest.New(t), org: db.NewID(), proj: db.NewID(), node: db.NewID(), now: noon}
}

func run[T any](w *world, fn func(ctx context.Context, tx db.Tx) (T, error)) (T, error) {
	ctx := w.t.Context()
	return db.RunTx(ctx, w.d, func(tx db.Tx) (T, error) { return fn(ctx, tx) })
}

func must[T any](w *world, fn func(ctx context.Context, tx db.Tx) (T, error)) T {
	w.t.Helper()
	out, err := run(w, fn)
	require.NoError(w.t, err)
	return out
}

func do(w *world, fn func(ctx context.Context, tx db.Tx) error) error {
	_, err := run(w, func(ctx context.Context, tx db.Tx) (struct{}, error) { return struct{}{}, fn(ctx, tx) })
	return err
}

func (w *world) credit(amount string) {
	w.t.Helper()
	nanos, err := ledger.ParseNanos(amount)
	require.NoError(w.t, err)
	w.keys++
	must(w, func(ctx context.Context, tx db.Tx) (ledger.Posting, error) {
		return ledger.GrantCredit(ctx, tx, ledger.Grant{
			OrgID: w.org, Currency: "EUR", Nanos: nanos, Description: "test",
			Key: fmt.Sprint(w.org, w.keys),
		}, w.now)
	})
}

func (w *world) price(p ledger.Price, amount string) ledger.Price {
	w.t.Helper()
	nanos, err := ledger.ParseNanos(amount)
	require.NoError(w.t, err)
	if p.Currency == "" {
		p.Currency = "EUR"
	}
	if p.Per == "" {
		p.Per = "hour"
	}
	p.Nanos = nanos
	return must(w, func(ctx context.Context, tx db.Tx) (ledger.Price, error) {
		return ledger.CreatePrice(ctx, tx, p, w.now)
	})
}

func (w *world) subject(kind string) ledger.Subject {
	return ledger.Subject{
		ID: db.NewID(), Kind: kind, OrgID: w.org, ProjectID: w.proj, AppInstanceID: db.NewID(), AppSlug: "demo",
		NodeID: w.node, SKU: "cpu-small",
		OperatingMode: "tenant_dedicated", ControlPlaneScope: "project", RuntimeBackend: "launchable_oci",
		CorrelationID: "req-1", OpenedAt: w.now,
	}
}

func (w *world) open(s ledger.Subject) (ledger.Subject, error) {
	return s, do(w, func(ctx context.Context, tx db.Tx) error { return ledger.OpenSubject(ctx, tx, s) })
}

// member is open and has no lease yet.
func (w *world) member() ledger.Subject {
	w.t.Helper()
	s, err := w.open(w.subject(ledger.Member))
	require.NoError(w.t, err)
	return s
}

func (w *world) tryLease(s ledger.Subject, d time.Duration) (*protocol.Lease, error) {
	return run(w, func(ctx context.Context, tx db.Tx) (*protocol.Lease, error) {
		return ledger.IssueLease(ctx, tx, ledger.LeaseRequest{
			SubjectID: s.ID, NodeID: s.NodeID, Now: w.now, Duration: d,
			AppSlug: s.AppSlug,
		})
	})
}

func (w *world) lease(s ledger.Subject, d time.Duration) *protocol.Lease {
	w.t.Helper()
	l, err := w.tryLease(s, d)
	require.NoError(w.t, err)
	return l
}

// session is a record of running time, from and to in seconds after noon.
func (w *world) session(s ledger.Subject, from, to float64) *protocol.UsageRecord {
	w.seq++
	return record(w.seq, s, protocol.MeterSessionSeconds, from, to, at(to).Sub(at(from)).Microseconds())
}

func record(seq uint64, s ledger.Subject, meter string, from, to float64, quantity int64) *protocol.UsageRecord {
	return &protocol.UsageRecord{
		Sequence: seq, MemberId: s.ID, Revision: 1, Meter: meter, Quantity: quantity, RunId: "r1", LeaseNo: 1,
		StartedAt: timestamppb.New(at(from)), EndedAt: timestamppb.New(at(to)),
	}
}

func (w *world) final(s ledger.Subject, when float64) *protocol.UsageRecord {
	r := w.session(s, when, when)
	r.Final = true
	return r
}

// at is a moment after noon, in whole microseconds.
func at(seconds float64) time.Time {
	return noon.Add(time.Duration(math.Round(seconds*1e6)) * time.Microsecond)
}

// post posts a segment and settles what that makes due.
func (w *world) post(records ...*protocol.UsageRecord) bool {
	w.t.Helper()
	posted := must(w, func(ctx context.Context, tx db.Tx) (bool, error) {
		return postUsage(ctx, tx, w.node, incarnation, records, w.now)
	})
	w.settle()
	return posted
}

// postUsage posts each record as a segment of its own, with the record's number, so that a test may post any records in
// any order. It reports whether any of them was new.
func postUsage(ctx context.Context, tx db.Tx, nodeID, incarnation string, records []*protocol.UsageRecord,
	now time.Time,
) (isNew bool, err error) {
	segments := make([]ledger.Segment, len(records))
	for i, r := range records {
		if segments[i], err = segmentOf(nodeID, incarnation, r.GetSequence(), r); err != nil {
			return false, err
		}
	}
	results, err := ledger.PostUsage(ctx, tx, now, segments...)
	for _, r := range results {
		isNew = isNew || r.New
		err = cmp.Or(err, r.Err)
	}
	return isNew, err
}

// segmentOf is the segment of a chain in which the digest of each is that of its number.
func segmentOf(nodeID, incarnation string, number uint64, records ...*protocol.UsageRecord) (ledger.Segment, error) {
	seg := &protocol.UsageSegment{Number: number, Records: records}
	if number > 1 {
		seg.PreviousSha256 = digestOf(number - 1)
	}
	return ledger.ReadSegment(billing.Store{NodeID: nodeID, Incarnation: incarnation}, seg, digestOf(number))
}

func digestOf(number uint64) []byte {
	sum := sha256.Sum256(binary.BigEndian.AppendUint64(nil, number))
	return sum[:]
}

func (w *world) close(s ledger.Subject, when time.Time) {
	w.t.Helper()
	require.NoError(w.t, do(w, func(ctx context.Context, tx db.Tx) error {
		return ledger.CloseSubject(ctx, tx, s.ID, when, w.now)
	}))
}

func (w *world) wallet() (available, held string) {
	w.t.Helper()
	b := must(w, func(ctx context.Context, tx db.Tx) ([]ledger.Balance, error) { return ledger.Wallet(ctx, tx, w.org) })
	if len(b) == 0 {
		return "", ""
	}
	return ledger.FormatNanos(b[0].AvailableNanos), ledger.FormatNanos(b[0].HeldNanos)
}

// flush posts all usage that the journal does not have yet.
func (w *world) flush() (subjects int) {
	w.t.Helper()
	return must(w, func(ctx context.Context, tx db.Tx) (int, error) {
		due, err := ledger.PendingPostings(ctx, tx, ledger.Pending{}, w.now.Add(time.Hour), 1000)
		for _, s := range due {
			if err := ledger.PostPending(ctx, tx, s.ID, w.now); err != nil {
				return 0, err
			}
		}
		return len(due), err
	})
}

// accounts are the sums of entries by account, as decimals; zero balances are left out.
func (w *world) accounts() map[string]string {
	w.t.Helper()
	w.flush()
	type row struct {
		account string
		nanos   int64
	}
	rows := query(w, `SELECT account, sum(amount_nanos)::int8 FROM entries GROUP BY account ORDER BY account`,
		func(scan func(...any) error) (r row, err error) {
			err = scan(&r.account, &r.nanos)
			return r, err
		})
	out := map[string]string{}
	for _, r := range rows {
		if r.nanos != 0 {
			out[r.account] = ledger.FormatNanos(r.nanos)
		}
	}
	return out
}

func query[T any](w *world, sql string, scan func(func(...any) error) (T, error), args ...any) []T {
	w.t.Helper()
	ctx := w.t.Context()
	out, err := db.ReadTx(ctx, w.d, func(tx db.Tx) ([]T, error) {
		rows, err := tx.Query(ctx, sql, args...)
		if err != nil {
			return nil, err
		}
		defer rows.Close()
		var all []T
		for rows.Next() {
			v, err := scan(rows.Scan)
			if err != nil {
				return nil, err
			}
			all = append(all, v)
		}
		return all, rows.Err()
	})
	require.NoError(w.t, err)
	return out
}

func number(w *world, sql string, args ...any) int64 {
	w.t.Helper()
	return query(w, sql, func(scan func(...any) error) (n int64, err error) {
		err = scan(&n)
		return n, err
	}, args...)[0]
}

type suspended struct {
	reason   string
	quantity int64
}

func (w *world) suspense() []suspended {
	return query(w, `SELECT reason, quantity FROM suspense_records ORDER BY sequence, started_at, reason`,
		func(scan func(...any) error) (s suspended, err error) {
			err = scan(&s.reason, &s.quantity)
			return s, err
		})
}

// checkInvariants holds what must be true of the books at any time.
func (w *world) checkInvariants() {
	w.t.Helper()
	require.Zero(w.t,
		number(w,
			`SELECT count(*) FROM (SELECT posting_id, currency FROM entries GROUP BY posting_id, currency
				HAVING sum(amount_nanos) <> 0) x`), "a posting does not sum to zero")
	require.Zero(w.t,
		number(w, `SELECT count(*) FROM postings p WHERE NOT EXISTS (SELECT 1 FROM entries e WHERE e.posting_id = p.id)`),
		"a posting without entries")
	require.Zero(w.t, number(w, `SELECT coalesce(sum(amount_nanos), 0)::int8 FROM entries`),
		"the accounts do not sum to zero")
	require.Zero(w.t, number(w, `SELECT count(*) FROM wallets w WHERE balance_nanos < 0 OR balance_nanos <>
		(SELECT coalesce(sum(amount_nanos), 0) FROM entries e WHERE e.account = 'wallet:' || w.org_id::text
		AND e.currency = w.currency)`), "a wallet is not its account")
	require.Zero(w.t,
		number(w,
			`SELECT count(*) FROM holds h WHERE placed_nanos < posted_nanos + released_nanos
				OR placed_nanos - posted_nanos - released_nanos <>
		(SELECT coalesce(sum(amount_nanos), 0) FROM entries e WHERE e.account = 'hold:' || h.id::text) -
		(SELECT coalesce(sum(collected_nanos), 0) FROM pending_postings p WHERE p.subject_id = h.subject_id)`),
		"a hold is not its account")
	require.Zero(w.t,
		number(w,
			`SELECT count(*) FROM pending_postings p JOIN subjects s ON s.id = p.subject_id WHERE p.since < s.settled_at`),
		"a settled bill waits")
	require.Zero(w.t,
		number(w,
			`SELECT count(*) FROM usage_hours WHERE charged_nanos <> collected_nanos + written_off_nanos
				OR host_nanos > collected_nanos`), "an accrual does not add up")
	require.Zero(w.t,
		number(w,
			`SELECT count(*) FROM holds h WHERE posted_nanos <> (SELECT coalesce(sum(collected_nanos), 0) FROM usage_hours a
				WHERE a.subject_id = h.subject_id)`), "a hold paid something else than its usage_hours")
	require.Zero(w.t,
		number(w,
			`SELECT count(*) FROM usage_hours a WHERE quantity > 3600000000 AND meter LIKE '%_seconds' AND meter <> 'cpu_seconds'
				AND meter NOT LIKE '%_byte_seconds'`), "an hour has more than an hour")
}

func faultCode(err error) string {
	if err == nil {
		return ""
	}
	return string(fault.As(err).Code)
}
