package ledger_test

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

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

// TestLaw05ASecondIsPostedOnce sends the same records repeatedly, out of order, cut differently and from several
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
			inParallel(t, segments, func(records []*protocol.UsageRecord) error {
				_, err := db.LockTx(t.Context(), w.d, func(tx db.Tx) (bool, error) {
					return postUsage(t.Context(), tx, w.node, incarnation, records, w.now)
				})
				return err
			})
			for _, seg := range segments {
				require.False(t, w.post(seg...), "a replay posts nothing")
			}
			for _, st := range all {
				require.Equal(t, at(st.to).Sub(at(st.from)).Microseconds(), number(w,
					`SELECT sum(quantity)::int8 FROM usage_hours WHERE subject_id = $1 AND meter = 'session_seconds'`, st.subject.ID))
			}
			require.Empty(t, w.suspense())
			require.EqualValues(t, w.seq, number(w, `SELECT last_record FROM usage_watermarks`), "posted without a gap")
			require.Zero(t, number(w, `SELECT count(*) FROM usage_ahead`))
			w.checkBill()
		})
	}
}

// inParallel calls send for all items, from four goroutines.
func inParallel[T any](t *testing.T, items []T, send func(T) error) {
	t.Helper()
	var wg sync.WaitGroup
	work := make(chan T)
	for range 4 {
		wg.Go(func() {
			for item := range work {
				if err := send(item); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for _, item := range items {
		work <- item
	}
	close(work)
	wg.Wait()
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
	for seed := range uint64(4) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			want := billOf(t, seed, func(w *world, _ *rand.Rand, segments []ledger.Segment) {
				for _, seg := range segments {
					require.NoError(t, w.sendBatch(seg))
				}
			})
			got := billOf(t, seed, func(w *world, rng *rand.Rand, segments []ledger.Segment) {
				mixed := slices.Concat(segments, segments[:len(segments)/2])
				rng.Shuffle(len(mixed), func(i, j int) { mixed[i], mixed[j] = mixed[j], mixed[i] })
				inParallel(t, batchesOf(rng, mixed), func(batch []ledger.Segment) error { return w.sendBatch(batch...) })
			})
			require.NotEmpty(t, want.accruals)
			require.Equal(t, want, got)
		})
	}
}

// batchesOf cuts segments into batches of random sizes.
func batchesOf(rng *rand.Rand, segments []ledger.Segment) (batches [][]ledger.Segment) {
	for len(segments) > 0 {
		n := min(1+rng.IntN(9), len(segments))
		batches, segments = append(batches, segments[:n]), segments[n:]
	}
	return batches
}

// sendBatch posts a batch as the hub does; an error is of the transaction or of a segment.
func (w *world) sendBatch(batch ...ledger.Segment) error {
	results, err := db.LockTx(w.t.Context(), w.d, func(tx db.Tx) ([]ledger.Posted, error) {
		return ledger.PostUsage(w.t.Context(), tx, w.now, batch...)
	})
	for _, r := range results {
		err = cmp.Or(err, r.Err)
	}
	return err
}

// bill is all hours and all accounts, with names in the place of ids.
type bill struct {
	accruals []string
	accounts map[string]string
}

// billOf gives three nodes two members each, has their segments delivered, and returns the bill.
func billOf(t *testing.T, seed uint64, deliver func(*world, *rand.Rand, []ledger.Segment)) bill {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 17))
	w := newWorld(t)
	priced(w)
	names := []string{w.org, "org"}
	var segments []ledger.Segment
	for n := range 3 {
		w.node, w.seq = db.NewID(), 0
		names = append(names, w.node, fmt.Sprint("node", n))
		sealed := uint64(0)
		for m, st := range streams(w, rng, 2) {
			names = append(names, st.subject.ID, fmt.Sprint("member", n, m))
			for _, records := range st.segments {
				sealed++
				seg, err := segmentOf(w.node, incarnation, sealed, records...)
				require.NoError(t, err)
				segments = append(segments, seg)
			}
		}
	}
	w.now = noon.Add(23 * time.Hour)
	deliver(w, rng, segments)
	w.checkBill()
	require.Empty(t, w.suspense())
	return w.bill(names)
}

func (w *world) bill(names []string) bill {
	text := func(scan func(...any) error) (s string, err error) {
		err = scan(&s)
		return s, err
	}
	for _, h := range query(w, `SELECT h.id::text || ' ' || h.subject_id::text FROM holds h`, text) {
		id, subject, _ := strings.Cut(h, " ")
		names = append(names, id, "of "+subject)
	}
	named := strings.NewReplacer(names...)
	out := bill{accounts: map[string]string{}}
	for account, sum := range w.accounts() {
		out.accounts[named.Replace(named.Replace(account))] = sum
	}
	for _, row := range query(w,
		`SELECT subject_id::text || ' ' || meter || ' ' || hour::text || ' ' || quantity || ' ' || charged_nanos || ' ' ||
			collected_nanos || ' ' || host_nanos
		FROM usage_hours`, text) {
		out.accruals = append(out.accruals, named.Replace(row))
	}
	slices.Sort(out.accruals)
	return out
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
