package ledger_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/rating"
	"github.com/gpuaas/gpuaas/protocol"
)

// run of one member, cut into segments of records.
type stream struct {
	subject  ledger.Subject
	segments [][]*protocol.UsageRecord
	from, to float64
}

// streams gives each member its own running time from noon on, cut at random into records and segments. Numbers run
// over all of them, as one node gives them out.
func streams(w *world, rng *rand.Rand, members int) []stream {
	out := make([]stream, members)
	for i := range out {
		s := w.subject(ledger.Member)
		s.CPUMillis, s.MemoryBytes = 4000, 8<<30
		s, err := w.open(s)
		require.NoError(w.t, err)
		w.lease(s, 24*time.Hour)
		st := stream{subject: s, from: 1, to: 1}
		for range 4 {
			var seg []*protocol.UsageRecord
			for range 1 + rng.IntN(4) {
				next := st.to + float64(1+rng.IntN(1_500_000_000))/1e6
				seg = append(seg, w.session(s, st.to, next))
				w.seq++
				seg = append(seg, record(w.seq, s, protocol.MeterCPUSeconds, st.to, next, int64((next-st.to)*1e6*rng.Float64())))
				w.seq++
				seg = append(seg, record(w.seq, s, protocol.MeterMemoryByteSeconds, st.to, next,
					int64((next-st.to)*float64(8<<30)*rng.Float64())))
				st.to = next
			}
			st.segments = append(st.segments, seg)
		}
		out[i] = st
	}
	return out
}

func priced(w *world) {
	w.credit("100000")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds, HostBasisPoints: 7000}, "1.234567891")
	w.price(ledger.Price{Meter: protocol.MeterCPUSeconds, HostBasisPoints: 3333}, "0.017")
	w.price(ledger.Price{Meter: protocol.MeterMemoryByteSeconds, HostBasisPoints: 0}, "0.003")
	w.price(ledger.Price{Meter: "unrelated", Per: "unit"}, "99")
}

// checkBill recomputes every charge from the usage rows and the price book, and holds the journal against it.
func (w *world) checkBill() {
	w.t.Helper()
	w.checkInvariants()
	w.flush()
	type row struct {
		subject, meter, price         string
		hour                          time.Time
		quantity, charged, nanos, per int64
	}
	rows := query(w,
		`SELECT a.subject_id, a.meter, a.price_id, a.hour, a.quantity, a.charged_nanos, p.nanos, p.per_quantity
		FROM usage_hours a JOIN prices p ON p.id = a.price_id`, func(scan func(...any) error) (r row, err error) {
			err = scan(&r.subject, &r.meter, &r.price, &r.hour, &r.quantity, &r.charged, &r.nanos, &r.per)
			return r, err
		})
	for _, r := range rows {
		want, err := rating.Charge(r.nanos, r.per, r.quantity)
		require.NoError(w.t, err)
		require.Equal(w.t, want, r.charged, "%s in %s: the charge is not price × quantity", r.meter, r.hour)
	}
	require.Zero(w.t,
		number(w,
			`SELECT count(*) FROM (SELECT subject_id, meter, price_id, sum(collected_nanos) AS collected, sum(written_off_nanos)
				AS written_off,
			min(hour) AS first, max(hour) + interval '1 hour' AS last FROM usage_hours WHERE charged_nanos > 0
			GROUP BY subject_id, meter, price_id) h
		LEFT JOIN (SELECT p.subject_id, p.meter, p.price_id, -sum(e.amount_nanos) FILTER (WHERE p.kind = 'usage'
		AND e.account LIKE 'hold:%') AS collected,
			-sum(e.amount_nanos) FILTER (WHERE p.kind = 'write_off' AND e.account = 'platform:write_off') AS written_off,
			min(p.period_from) AS first, max(p.period_to) AS last
			FROM postings p JOIN entries e ON e.posting_id = p.id WHERE p.kind IN ('usage', 'write_off')
			GROUP BY p.subject_id, p.meter, p.price_id) j
			USING (subject_id, meter, price_id)
		WHERE h.collected <> coalesce(j.collected, 0) OR h.written_off <> coalesce(j.written_off, 0) OR j.first < h.first
		OR j.last > h.last`), "the journal is not the hours")
	require.Zero(w.t, number(w, `SELECT count(*) FROM (
		SELECT subject_id, meter, sum(quantity) AS q FROM usage_recent GROUP BY subject_id, meter) u
		FULL JOIN (SELECT subject_id, meter, sum(quantity) AS q FROM usage_hours
		GROUP BY subject_id, meter) a USING (subject_id, meter)
		WHERE coalesce(u.q, 0) <> coalesce(a.q, 0)`), "usage and its hours differ")
}

// TestLaw05ASecondIsPostedOnce sends the same segments repeatedly, out of order, cut differently and from several
// connections at once: all hours, all accounts come out as if each had come once.
func TestLaw05ASecondIsPostedOnce(t *testing.T) {
	for seed := range uint64(3) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 5))
			w := newWorld(t)
			priced(w)
			all := streams(w, rng, 3)
			w.now = noon.Add(23 * time.Hour)
			var segments [][]*protocol.UsageRecord
			for _, st := range all {
				segments = append(segments, st.segments...)
				segments = append(segments, st.segments[rng.IntN(len(st.segments))])
			}
			rng.Shuffle(len(segments), func(i, j int) { segments[i], segments[j] = segments[j], segments[i] })

			var wg sync.WaitGroup
			work := make(chan []*protocol.UsageRecord)
			errs := make(chan error, len(segments))
			for range 4 {
				wg.Go(func() {
					for seg := range work {
						_, err := db.RunTx(t.Context(), w.d, func(tx db.Tx) (bool, error) {
							return postUsage(t.Context(), tx, w.node, incarnation, seg, w.now)
						})
						errs <- err
					}
				})
			}
			for _, seg := range segments {
				work <- seg
			}
			close(work)
			wg.Wait()
			close(errs)
			for err := range errs {
				require.NoError(t, err)
			}
			for _, seg := range segments {
				require.False(t, w.post(seg...), "a replay posts nothing")
			}
			for _, st := range all {
				require.Equal(t, at(st.to).Sub(at(st.from)).Microseconds(), number(w,
					`SELECT sum(quantity)::int8 FROM usage_hours WHERE subject_id = $1 AND meter = 'session_seconds'`, st.subject.ID))
			}
			require.Empty(t, w.suspense())
			require.EqualValues(t, 1, number(w, `SELECT count(*) FROM usage_sequences`), "posted numbers are one joined range")
			w.checkBill()
		})
	}
}

// TestLaw05CuttingDoesNotChangeTheBill bills the same hours once in one record and once in a thousand.
func TestLaw05CuttingDoesNotChangeTheBill(t *testing.T) {
	bill := func(pieces int) (total, host int64) {
		w := newWorld(t)
		priced(w)
		s := w.member()
		w.lease(s, 24*time.Hour)
		w.now = noon.Add(3 * time.Hour)
		var seg []*protocol.UsageRecord
		const length = 9999.9
		for i := range pieces {
			seg = append(seg, w.session(s, float64(int(length*1e6)*i/pieces)/1e6, float64(int(length*1e6)*(i+1)/pieces)/1e6))
		}
		for len(seg) > 0 {
			n := min(len(seg), 97)
			w.post(seg[:n]...)
			seg = seg[n:]
		}
		w.checkBill()
		return number(w, `SELECT sum(collected_nanos)::int8 FROM usage_hours`),
			number(w, `SELECT sum(host_nanos)::int8 FROM usage_hours`)
	}
	one, oneHost := bill(1)
	many, manyHost := bill(1000)
	require.Equal(t, one, many)
	require.Equal(t, oneHost, manyHost)
	require.Positive(t, one)
}

// TestLaw05BatchingDoesNotChangeTheBill bills the hours of several nodes once segment by segment and in order, and once
// in batches of any size that mix nodes, orders and repetitions, several at once: every accrual and every account comes
// out alike.
func TestLaw05BatchingDoesNotChangeTheBill(t *testing.T) {
	type bill struct {
		accruals []string
		accounts map[string]string
	}
	for seed := range uint64(4) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			post := func(deliver func(w *world, rng *rand.Rand, segments []ledger.Segment)) bill {
				rng := rand.New(rand.NewPCG(seed, 17))
				w := newWorld(t)
				priced(w)
				var pairs []string
				var segments []ledger.Segment
				for n := range 3 {
					w.node, w.seq = db.NewID(), 0
					pairs = append(pairs, w.node, fmt.Sprint("node", n))
					for m, st := range streams(w, rng, 2) {
						pairs = append(pairs, st.subject.ID, fmt.Sprint("member", n, m))
						for _, records := range st.segments {
							seg, err := ledger.ReadSegment(w.node, incarnation, &protocol.UsageSegment{Records: records})
							require.NoError(t, err)
							segments = append(segments, seg)
						}
					}
				}
				w.now = noon.Add(23 * time.Hour)
				deliver(w, rng, segments)
				w.checkBill()
				require.Empty(t, w.suspense())
				for _, h := range query(w, `SELECT h.id::text || ' ' || h.subject_id::text FROM holds h`,
					func(scan func(...any) error) (s string, err error) {
						err = scan(&s)
						return s, err
					}) {
					id, subject, _ := strings.Cut(h, " ")
					pairs = append(pairs, id, "of "+subject)
				}
				names := strings.NewReplacer(append(pairs, w.org, "org")...)
				out := bill{accounts: map[string]string{}}
				for account, sum := range w.accounts() {
					out.accounts[names.Replace(names.Replace(account))] = sum
				}
				for _, row := range query(w,
					`SELECT subject_id::text || ' ' || meter || ' ' || hour::text || ' ' || quantity || ' ' || charged_nanos || ' ' ||
						collected_nanos || ' ' || host_nanos
					FROM usage_hours`, func(scan func(...any) error) (s string, err error) {
						err = scan(&s)
						return s, err
					}) {
					out.accruals = append(out.accruals, names.Replace(row))
				}
				slices.Sort(out.accruals)
				return out
			}
			send := func(w *world, segments ...ledger.Segment) error {
				_, err := db.RunTx(t.Context(), w.d, func(tx db.Tx) (int, error) {
					return ledger.PostUsage(t.Context(), tx, w.now, segments...)
				})
				return err
			}
			want := post(func(w *world, _ *rand.Rand, segments []ledger.Segment) {
				for _, seg := range segments {
					require.NoError(t, send(w, seg))
				}
			})
			got := post(func(w *world, rng *rand.Rand, segments []ledger.Segment) {
				mixed := slices.Concat(segments, segments[:len(segments)/2])
				rng.Shuffle(len(mixed), func(i, j int) { mixed[i], mixed[j] = mixed[j], mixed[i] })
				var wg sync.WaitGroup
				for len(mixed) > 0 {
					n := min(1+rng.IntN(9), len(mixed))
					batch := mixed[:n]
					mixed = mixed[n:]
					wg.Go(func() {
						if err := send(w, batch...); err != nil {
							t.Error(err)
						}
					})
				}
				wg.Wait()
			})
			require.NotEmpty(t, want.accruals)
			require.Equal(t, want, got)
		})
	}
}

// TestLaw05NoSecondOfAMemberIsPostedTwice gives overlapping records of other runs, numbers and incarnations: running
// time is their union.
func TestLaw05NoSecondOfAMemberIsPostedTwice(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	w := newWorld(t)
	priced(w)
	s := w.member()
	w.lease(s, 24*time.Hour)
	w.now = noon.Add(time.Hour)
	var spans []rating.Interval
	for i := range 60 {
		from := rng.IntN(3000)
		to := from + 1 + rng.IntN(120)
		r := record(uint64(i/2+1), s, protocol.MeterSessionSeconds, float64(from), float64(to), int64(to-from)*1e6)
		r.RunId = fmt.Sprint("run", rng.IntN(5))
		spans = append(spans, rating.Interval{From: at(float64(from)), To: at(float64(to))})
		must(w, func(ctx context.Context, tx db.Tx) (bool, error) {
			return postUsage(ctx, tx, w.node, fmt.Sprint("i", i%2), []*protocol.UsageRecord{r}, w.now)
		})
	}
	union := rating.TotalLength(rating.Union(spans))
	require.Equal(t, union, number(w, `SELECT sum(quantity)::int8 FROM usage_recent`))
	total := int64(0)
	for _, i := range spans {
		total += i.Length()
	}
	require.Equal(t, total-union,
		number(w, `SELECT sum(quantity)::int8 FROM suspense_records WHERE reason = 'already_billed'`))
	w.checkBill()
}

// TestLaw06EveryPostingSumsToZero refuses unbalanced postings where they are built.
func TestLaw06EveryPostingSumsToZero(t *testing.T) {
	leg := func(account, currency string, nanos int64) ledger.Leg {
		return ledger.Leg{Account: account, Currency: currency, Nanos: nanos}
	}
	for name, legs := range map[string][]ledger.Leg{
		"not zero":       {leg("a", "EUR", 1), leg("b", "EUR", -2)},
		"two currencies": {leg("a", "EUR", 1), leg("b", "USD", -1)},
		"one leg":        {leg("a", "EUR", 0)},
		"empty leg":      {leg("a", "EUR", 1), leg("b", "EUR", -1), leg("c", "EUR", 0)},
		"no account":     {leg("a", "EUR", 1), leg("", "EUR", -1)},
		"no currency":    {leg("a", "", 1), leg("b", "", -1)},
		"wraps around":   {leg("a", "EUR", 1<<62), leg("b", "EUR", 1<<62), leg("c", "EUR", 1<<62), leg("d", "EUR", 1<<62)},
		"none":           nil,
	} {
		_, err := ledger.NewPosting("k", legs...)
		require.Error(t, err, name)
	}
	_, err := ledger.NewPosting("", ledger.Leg{Account: "a", Currency: "EUR", Nanos: 1},
		ledger.Leg{Account: "b", Currency: "EUR", Nanos: -1})
	require.Error(t, err)
	p, err := ledger.NewPosting("k", ledger.Leg{Account: "a", Currency: "EUR", Nanos: 3},
		ledger.Leg{Account: "b", Currency: "EUR", Nanos: -2}, ledger.Leg{Account: "c", Currency: "EUR", Nanos: -1})
	require.NoError(t, err)
	require.NotEmpty(t, p.ID)
}

// TestLaw06PostedRowsNeverChange reads every SQL statement of the hub: none updates or deletes a row of the journal, of
// usage, of suspense or of the price book, but that records in suspense and raw usage have a retention.
func TestLaw06PostedRowsNeverChange(t *testing.T) {
	change := regexp.MustCompile(
		`(?is)\b(UPDATE|DELETE\s+FROM|TRUNCATE(\s+TABLE)?)\s+(ONLY\s+)?"?(postings|entries|usage_records_\d?|` +
			`suspense_records|prices)\b`)
	upsert := regexp.MustCompile(
		"(?is)INSERT\\s+INTO\\s+(postings|entries|usage_records_\\d?|suspense_records|prices)\\b[^`]*DO\\s+UPDATE")
	seen := 0
	require.NoError(t, filepath.WalkDir("../..", func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() || strings.HasSuffix(path, "_test.go") || !slices.Contains([]string{".go", ".sql"},
			filepath.Ext(path)) {
			return err
		}
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		var allowed []string
		switch path {
		case filepath.Join("..", "..", "internal", "ledger", "retention.go"):
			allowed = []string{"DELETE FROM suspense_records"}
		case filepath.Join("..", "..", "internal", "ledger", "slot.go"):
			allowed = []string{"TRUNCATE TABLE usage_records_"}
		}
		require.Equal(t, allowed, change.FindAllString(string(text), -1), path)
		require.Empty(t, upsert.FindString(string(text)), path)
		seen++
		return nil
	}))
	require.Greater(t, seen, 20)
}

// TestLaw06RowsAreTheSameAfterMoreIsPosted compares all earlier rows of the books after later work.
func TestLaw06RowsAreTheSameAfterMoreIsPosted(t *testing.T) {
	w := newWorld(t)
	priced(w)
	st := streams(w, rand.New(rand.NewPCG(9, 9)), 2)
	w.now = noon.Add(23 * time.Hour)
	for _, s := range st {
		w.post(s.segments[0]...)
	}
	rows := func(until time.Time) []string {
		return query(w,
			`SELECT p.id::text || p.key || p.kind || p.created_at::text || e.leg::text || e.account || e.amount_nanos::text
			FROM postings p JOIN entries e ON e.posting_id = p.id WHERE p.created_at <= $1 ORDER BY p.id, e.leg`,
			func(scan func(...any) error) (s string, err error) {
				err = scan(&s)
				return s, err
			}, until)
	}
	first := w.now
	before := rows(first)
	w.now = w.now.Add(time.Minute)
	for _, s := range st {
		for _, seg := range s.segments {
			w.post(seg...)
		}
		w.close(s.subject, w.now)
		w.post(w.final(s.subject, 80_000))
	}
	require.Equal(t, before, rows(first))
	require.Greater(t, len(rows(w.now)), len(before))
	require.Zero(t, number(w, `SELECT count(*) FROM subjects WHERE settled_at IS NULL`))
	_, held := w.wallet()
	require.Equal(t, "0", held)
	w.checkBill()
}

// TestLaw06AKeyPostsOnce lets the database itself refuse the second posting under one key.
func TestLaw06AKeyPostsOnce(t *testing.T) {
	w := newWorld(t)
	grant := func() error {
		return do(w, func(ctx context.Context, tx db.Tx) error {
			_, err := ledger.GrantCredit(ctx, tx, ledger.Grant{
				OrgID: w.org, Currency: "EUR", Nanos: 5, Description: "d",
				Key: "same",
			}, w.now)
			return err
		})
	}
	require.NoError(t, grant())
	require.True(t, db.IsUniqueViolation(grant()))
	available, _ := w.wallet()
	require.Equal(t, "0.000000005", available)
	w.checkInvariants()
}

// TestLaw07UsageNeverTakesAWalletBelowZero lets nodes report far more than was held, and members open at once against a
// wallet that covers one: no account of a tenant goes below zero, and what is not paid is written off in the open.
func TestLaw07UsageNeverTakesAWalletBelowZero(t *testing.T) {
	w := newWorld(t)
	w.credit("5")
	w.price(ledger.Price{Meter: protocol.MeterCPUSeconds, HostBasisPoints: 5000}, "36")
	s := w.subject(ledger.Member) // its limit is unknown: nothing is held for processor time
	s, err := w.open(s)
	require.NoError(t, err)
	w.lease(s, time.Hour)
	w.now = at(1000)
	w.post(record(1, s, protocol.MeterCPUSeconds, 0, 1000, 1_000_000_000))
	available, held := w.wallet()
	require.Equal(t, "5", available)
	require.Equal(t, "0", held)
	require.Equal(t, map[string]string{
		"platform:credit": "-5", "wallet:" + w.org: "5", "platform:revenue": "10", "platform:write_off": "-10",
	}, w.accounts(), "the host has no share of what nobody paid")
	w.checkBill()
}

// TestLaw07LateUsageIsWrittenOff: the hold is gone, the wallet is not touched.
func TestLaw07LateUsageIsWrittenOff(t *testing.T) {
	w := newWorld(t)
	w.credit("100")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds, HostBasisPoints: 7000}, "3.6")
	s := w.member()
	w.lease(s, time.Hour)
	w.now = at(3600)
	w.close(s, at(1800))
	w.now = noon.Add(time.Hour + billing.StaleAfter)
	require.Zero(t, w.settle(), "not yet")
	w.now = w.now.Add(time.Second)
	require.Equal(t, 1, w.settle())
	require.Zero(t, w.settle())
	available, _ := w.wallet()
	require.Equal(t, "100", available)

	w.post(w.session(s, 0, 100))
	require.Equal(t, "0.1", w.accounts()["platform:revenue"])
	require.Equal(t, "-0.1", w.accounts()["platform:write_off"])
	available, _ = w.wallet()
	require.Equal(t, "100", available)
	w.checkBill()
}

// TestLaw07ConcurrentHoldsNeverOverdraw opens many leases at once against one wallet.
func TestLaw07ConcurrentHoldsNeverOverdraw(t *testing.T) {
	w := newWorld(t)
	w.credit("10")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "3.6")
	var members []ledger.Subject
	for range 8 {
		members = append(members, w.member())
	}
	granted := make(chan bool, len(members))
	var wg sync.WaitGroup
	for _, s := range members {
		wg.Go(func() {
			_, err := db.RunTx(t.Context(), w.d, func(tx db.Tx) (*protocol.Lease, error) {
				return ledger.IssueLease(t.Context(), tx, ledger.LeaseRequest{
					SubjectID: s.ID, NodeID: s.NodeID, Now: w.now,
					Duration: 50 * time.Minute,
				})
			})
			if code := faultCode(err); code != "" && code != "insufficient_funds" {
				t.Error(err)
			}
			granted <- err == nil
		})
	}
	wg.Wait()
	close(granted)
	n := 0
	for ok := range granted {
		if ok {
			n++
		}
	}
	// Two full leases at 3.6, and a shortened one from what is left.
	require.Equal(t, 3, n)
	w.checkInvariants()
}
