package ledger_test

import (
	"context"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestUsageDrawsOnTheHoldAndPaysTheHost(t *testing.T) {
	w := newWorld(t)
	w.credit("1000")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds, HostBasisPoints: 7000}, "3.6")
	s := w.member()
	l := w.lease(s, 24*time.Hour)
	require.EqualValues(t, 1, l.GetLeaseNo())
	require.Equal(t, "EUR", l.GetCurrency())
	require.Len(t, l.GetPrices(), 1)
	// 24 h and 10 min at 3.6 an hour.
	available, held := w.wallet()
	require.Equal(t, "913", available)
	require.Equal(t, "87", held)
	require.Equal(t, "87", ledger.FormatNanos(l.GetCapNanos()))

	w.now = at(61)
	require.True(t, w.post(w.session(s, 1, 31), w.session(s, 31, 61)))
	require.Equal(t, map[string]string{
		"platform:credit": "-1000", "wallet:" + w.org: "913", "hold:" + l.GetHoldId(): "86.94", "platform:revenue": "0.018",
		"host:" + w.node: "0.042",
	}, w.accounts())

	records, next, err := list(w, ledger.Filter{
		OrgID: w.org, AppInstanceID: s.AppInstanceID,
		UsageSource: ledger.SourceAppRuntime,
	})
	require.NoError(t, err)
	require.Empty(t, next)
	require.Len(t, records, 2)
	require.EqualValues(t, 30_000_000, records[0].Quantity)
	require.NotEmpty(t, records[0].PostingID)
	require.Equal(t, "demo", records[0].AppSlug)

	w.close(s, at(61))
	_, held = w.wallet()
	require.Equal(t, "86.94", held, "the node may still report usage")
	w.post(w.final(s, 61))
	available, held = w.wallet()
	require.Equal(t, "999.94", available)
	require.Equal(t, "0", held)
	w.checkInvariants()
}

func list(w *world, f ledger.Filter) (records []ledger.UsageRecord, next string, err error) {
	_, err = run(w, func(ctx context.Context, tx db.Tx) (struct{}, error) {
		records, next, err = ledger.ListUsage(ctx, tx, f)
		return struct{}{}, err
	})
	return records, next, err
}

func TestUsageBeyondClaimLeaseAndElapsedTimeIsInSuspense(t *testing.T) {
	w := newWorld(t)
	w.credit("1000")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "3.6")
	s, other := w.member(), w.member()
	w.lease(s, time.Hour)
	foreign := w.subject(ledger.Member)
	foreign.NodeID = db.NewID()
	foreign, err := w.open(foreign)
	require.NoError(t, err)

	w.now = at(3500)
	records := []*protocol.UsageRecord{
		w.session(s, -10, 10),  // 10 s before the claim
		w.session(s, 5, 20),    // 5 s billed already
		w.session(s, 60, 50),   // backwards
		w.session(s, 100, 110), // made 15 s longer than its length below
		// 20 s beyond now and the clocks' allowance, 20 s more beyond the lease
		w.session(s, 3490, 3640),
		w.session(other, 0, 10),                          // no lease
		w.session(foreign, 0, 10),                        // another node's
		w.session(ledger.Subject{ID: db.NewID()}, 0, 10), // nobody's
		w.session(ledger.Subject{ID: "x'; DROP"}, 0, 10), // not even an id
	}
	records[3].Quantity = 25_000_000
	w.post(records...)
	require.Equal(t, []suspended{
		{billing.SuspenseOutsideClaim, 10_000_000},
		{billing.SuspenseAlreadyBilled, 5_000_000},
		{billing.SuspenseMalformed, -10_000_000},
		{billing.SuspenseBeyondElapsed, 15_000_000},
		{billing.SuspenseOutsideLease, 20_000_000},
		{billing.SuspenseBeyondElapsed, 20_000_000},
		{billing.SuspenseOutsideLease, 10_000_000},
		{billing.SuspenseWrongNode, 10_000_000},
		{billing.SuspenseUnknownSubject, 10_000_000},
		{billing.SuspenseUnknownSubject, 10_000_000},
	}, w.suspense())
	require.EqualValues(t, 10+10+10+110, number(w, `SELECT sum(quantity)::int8 / 1000000 FROM usage_recent`))
	w.checkInvariants()
}

func TestUsageAfterTheClaimIsInSuspense(t *testing.T) {
	w := newWorld(t)
	w.credit("1000")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "3.6")
	s := w.member()
	w.lease(s, time.Hour)
	w.now = at(100)
	w.close(s, at(50))
	w.post(w.session(s, 40, 60))
	require.Equal(t, []suspended{{billing.SuspenseOutsideClaim, 10_000_000}}, w.suspense())
}

func TestAnotherIncarnationBillsNoSecondAgain(t *testing.T) {
	w := newWorld(t)
	w.credit("1000")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "3.6")
	s := w.member()
	w.lease(s, time.Hour)
	w.now = at(200)
	w.post(w.session(s, 0, 100))
	must(w, func(ctx context.Context, tx db.Tx) (bool, error) {
		return postUsage(ctx, tx, w.node, "i2", []*protocol.UsageRecord{
			record(1, s, protocol.MeterSessionSeconds, 50, 150, 100_000_000),
		}, w.now)
	})
	require.EqualValues(t, 150_000_000, number(w, `SELECT sum(quantity)::int8 FROM usage_recent`))
	require.Equal(t, []suspended{{billing.SuspenseAlreadyBilled, 50_000_000}}, w.suspense())
}

func TestBrokenNumberingIsRefusedForGood(t *testing.T) {
	w := newWorld(t)
	s := w.member()
	_, err := segmentOf(w.node, incarnation, 1,
		record(1, s, protocol.MeterSessionSeconds, 0, 1, 1e6), record(3, s, protocol.MeterSessionSeconds, 1, 2, 1e6))
	require.Equal(t, "segment_numbering", faultCode(err))
}

func TestProcessorAndMemoryAreBoundByTheMembersLimits(t *testing.T) {
	w := newWorld(t)
	w.credit("1000")
	w.price(ledger.Price{Meter: protocol.MeterCPUSeconds}, "3.6")
	w.price(ledger.Price{Meter: protocol.MeterMemoryByteSeconds}, "0.36")
	s := w.subject(ledger.Member)
	s.CPUMillis, s.MemoryBytes = 2000, 4<<30
	s, err := w.open(s)
	require.NoError(t, err)
	w.lease(s, 50*time.Minute)
	_, held := w.wallet()
	require.Equal(t, "8.64", held, "an hour of two cores at 3.6 and of four GiB at 0.36")
	w.now = at(10)
	w.post(
		record(1, s, protocol.MeterCPUSeconds, 0, 10, 30_000_000),
		record(2, s, protocol.MeterMemoryByteSeconds, 0, 10, 4<<30*20),
	)
	require.Equal(t, []suspended{
		{billing.SuspenseBeyondLimit, 30_000_000 - 20_650_000},
		{billing.SuspenseBeyondLimit, 4 << 30 * 10},
	}, w.suspense())
	w.checkInvariants()
}

func TestUnpricedUsageIsRecordedAndFree(t *testing.T) {
	w := newWorld(t)
	s := w.member()
	l := w.lease(s, time.Hour)
	require.Empty(t, l.GetPrices())
	w.now = at(10)
	require.True(t, w.post(w.session(s, 0, 10)))
	require.EqualValues(t, 1, number(w, `SELECT count(*) FROM usage_recent WHERE posting_id IS NULL`))
	require.Empty(t, w.accounts())
}

func TestListingsPageAndFilter(t *testing.T) {
	w := newWorld(t)
	w.credit("1000")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "3.6")
	a, b := w.member(), w.member()
	w.lease(a, time.Hour)
	w.lease(b, time.Hour)
	w.now = at(100)
	for i := range 5 {
		w.post(w.session(a, float64(i), float64(i+1)), w.session(b, float64(i), float64(i+1)))
	}
	var seen []string
	f := ledger.Filter{OrgID: w.org, AppInstanceID: a.AppInstanceID, Meter: protocol.MeterSessionSeconds, Limit: 2}
	for {
		rows, next, err := list(w, f)
		require.NoError(t, err)
		for _, r := range rows {
			seen = append(seen, r.StartedAt.Format("05"))
		}
		if f.Before = next; next == "" {
			break
		}
	}
	require.Equal(t, []string{"04", "03", "02", "01", "00"}, seen)
	rows, _, err := list(w, ledger.Filter{ProjectID: w.proj, From: at(1), To: at(3)})
	require.NoError(t, err)
	require.Len(t, rows, 4)
	rows, _, err = list(w, ledger.Filter{OrgID: db.NewID()})
	require.NoError(t, err)
	require.Empty(t, rows)
	_, _, err = list(w, ledger.Filter{Before: "nonsense"})
	require.Equal(t, "cursor_invalid", faultCode(err))

	w.flush()
	postings := must(w, func(ctx context.Context, tx db.Tx) ([]ledger.Posting, error) {
		p, _, err := ledger.ListPostings(ctx, tx, ledger.Filter{
			OrgID: w.org, AppInstanceID: a.AppInstanceID,
			Kind: ledger.Usage,
		})
		return p, err
	})
	require.Len(t, postings, 1, "five records of one hour")
	require.Len(t, postings[0].Legs, 2)
	require.Equal(t, noon, postings[0].PeriodFrom)
	require.Equal(t, noon.Add(time.Hour), postings[0].PeriodTo)
}

func TestAListingHasTheUsageThatReachesIntoItsTime(t *testing.T) {
	w := newWorld(t)
	s := w.member()
	w.lease(s, time.Hour)
	w.now = at(100)
	require.True(t, w.post(w.session(s, 10, 70)))
	for _, test := range []struct{ from, to float64 }{{0, 11}, {20, 30}, {69, 100}} {
		rows, _, err := list(w, ledger.Filter{OrgID: w.org, From: at(test.from), To: at(test.to)})
		require.NoError(t, err)
		require.Len(t, rows, 1, "from %v to %v", test.from, test.to)
	}
	for _, test := range []struct{ from, to float64 }{{0, 10}, {70, 100}} {
		rows, _, err := list(w, ledger.Filter{OrgID: w.org, From: at(test.from), To: at(test.to)})
		require.NoError(t, err)
		require.Empty(t, rows, "from %v to %v", test.from, test.to)
	}
}

// TestNothingANodeSaysBlocksItsUsage posts records with extreme and nonsensical values: each segment is taken, the good
// record behind them is billed, and the books stay balanced.
func TestNothingANodeSaysBlocksItsUsage(t *testing.T) {
	w := newWorld(t)
	priced(w)
	s := w.subject(ledger.Member) // no limits: nothing but the arithmetic stops a quantity
	s, err := w.open(s)
	require.NoError(t, err)
	w.lease(s, 24*time.Hour)
	w.now = noon.Add(20 * time.Hour)
	rapid.Check(t, func(rt *rapid.T) {
		pick := func(label string, extremes ...int64) int64 {
			return rapid.OneOf(rapid.SampledFrom(extremes), rapid.Int64()).Draw(rt, label)
		}
		text := rapid.OneOf(rapid.SampledFrom([]string{
			"", "\x00", s.ID, protocol.MeterSessionSeconds,
			protocol.MeterMemoryByteSeconds, strings.Repeat("é", 900),
		}), rapid.String())
		stamp := func(label string) *timestamppb.Timestamp {
			if rapid.Bool().Draw(rt, label+" absent") {
				return nil
			}
			return &timestamppb.Timestamp{
				Seconds: pick(label, noon.Unix(), noon.Unix()+60, 0, math.MaxInt64, math.MinInt64),
				Nanos:   int32(pick(label+" nanos", 0, 1, 999_999_999, -1)),
			}
		}
		var records []*protocol.UsageRecord
		for range rapid.IntRange(1, 6).Draw(rt, "records") {
			w.seq++
			records = append(records, &protocol.UsageRecord{
				Sequence: w.seq, MemberId: rapid.OneOf(rapid.Just(s.ID), text).Draw(rt, "member"), Meter: text.Draw(rt, "meter"),
				RunId:    text.Draw(rt, "run"),
				Quantity: pick("quantity", 0, 1, -1, math.MaxInt64, math.MinInt64), LeaseNo: uint64(pick("lease", 0, 1)),
				Revision:  uint64(pick("revision", 1)),
				StartedAt: stamp("start"), EndedAt: stamp("end"), Final: rapid.Bool().Draw(rt, "final"),
			})
		}
		if !w.post(records...) {
			rt.Fatal("not posted")
		}
	})
	good := record(w.seq+1, s, protocol.MeterSessionSeconds, 60_000, 60_010, 10_000_000)
	require.True(t, w.post(good))
	require.EqualValues(t, 1, number(w, `SELECT count(*) FROM usage_recent WHERE started_at = $1 AND quantity = 10000000`,
		at(60_000)))
	w.checkInvariants()
}

func TestUsageIsPricedByTheLeaseThatCoversItWhateverTheNodeNames(t *testing.T) {
	w := newWorld(t)
	w.credit("10000")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds, HostBasisPoints: 7000}, "36")
	s := w.member()
	w.lease(s, time.Hour)
	w.now = at(2 * 86400)
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds, HostBasisPoints: 7000}, "3.6")
	w.lease(s, 24*time.Hour)
	w.now = w.now.Add(2 * time.Hour)
	r := w.session(s, 2*86400, 2*86400+3600)
	r.LeaseNo = 1 // which ended two days before
	w.post(r)
	require.Equal(t, "2.52", w.accounts()["host:"+w.node], "an hour at 3.6")
	require.Empty(t, w.suspense())

	// A record over the end of one lease and the beginning of the next is rated by both.
	w.now = at(2 * 86400).Add(23 * time.Hour)
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds, HostBasisPoints: 7000}, "36")
	w.now = at(3 * 86400)
	w.lease(s, 24*time.Hour)
	w.now = w.now.Add(2 * time.Hour)
	r = w.session(s, 3*86400-1800, 3*86400+1800)
	r.LeaseNo = 2
	w.post(r)
	require.Equal(t, "16.38", w.accounts()["host:"+w.node], "half an hour at 3.6 and half an hour at 36 more")
	w.checkBill()
}

// What no honest meter makes goes to suspense before it costs other nodes' batches time.
func TestUsageInSliversIsInSuspense(t *testing.T) {
	w := newWorld(t)
	w.credit("1000")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "3.6")
	s, other := w.member(), w.member()
	w.lease(s, 24*time.Hour)
	w.lease(other, 24*time.Hour)
	must(w, func(ctx context.Context, tx db.Tx) (int64, error) {
		tag, err := tx.Exec(ctx, `INSERT INTO usage_coverage (node_id, subject_id, meter, run_id, from_at, to_at)
			SELECT $3::uuid, $1, 'session_seconds', '', $2::timestamptz + n * interval '2 microseconds',
				$2::timestamptz + n * interval '2 microseconds' + interval '1 microsecond'
			FROM generate_series(1, 100000) AS n`, s.ID, noon, s.NodeID)
		return tag.RowsAffected(), err
	})
	w.now = at(7200)
	slivers := make([]*protocol.UsageRecord, 0, 4097)
	for n := range 4096 {
		slivers = append(slivers, w.session(s, 0.00002*float64(n), 0.00002*float64(n)+0.000001))
	}
	w.post(append(slivers, w.session(other, 0, 3600))...)
	require.EqualValues(t, 4096, number(w, `SELECT count(*) FROM suspense_records WHERE reason = $1`,
		billing.SuspenseTooFragmented))
	require.EqualValues(t, 3600_000_000, number(w, `SELECT sum(quantity)::int8 FROM usage_recent`),
		"its neighbour's is billed")
	require.EqualValues(t, 100_001, number(w, `SELECT count(*) FROM usage_coverage`))

	// Many records in one hour, without a gap.
	many := make([]*protocol.UsageRecord, 0, 4000)
	for n := range 4000 {
		many = append(many, w.session(s, 3600+0.001*float64(n), 3600+0.001*float64(n+1)))
	}
	w.post(many...)
	require.EqualValues(t, 400, number(w, `SELECT count(*) FROM suspense_records WHERE reason = $1 AND started_at >= $2`,
		billing.SuspenseTooFragmented, at(3600)))
	w.checkInvariants()
}

// In whatever order segments come, what is kept of a chain is the last record without a gap and the segments beyond it.
func TestChainKeepsOnlyWhatIsBeyondAGap(t *testing.T) {
	w := newWorld(t)
	s := w.member()
	post := func(n uint64) {
		w.post(record(n, s, protocol.MeterSessionSeconds, float64(n), float64(n)+1, 1_000_000))
	}
	kept := func() [2]int64 {
		return [2]int64{
			number(w, `SELECT last_record FROM usage_watermarks`), number(w, `SELECT count(*) FROM usage_ahead`),
		}
	}
	for n := uint64(1); n < 20; n += 2 {
		post(n)
	}
	require.Equal(t, [2]int64{1, 9}, kept())
	for n := uint64(18); n > 2; n -= 2 {
		post(n)
	}
	require.Equal(t, [2]int64{1, 17}, kept())
	post(2)
	require.Equal(t, [2]int64{19, 0}, kept())
	require.EqualValues(t, 19, number(w, `SELECT count(*) FROM suspense_records`)+
		number(w, `SELECT count(*) FROM usage_recent`), "each record once")
}

// Beyond its budget of an hour a node's usage in suspense leaves sums and no rows; the rows of other nodes are written
// as ever.
func TestSuspenseBeyondANodesBudgetLeavesSumsOnly(t *testing.T) {
	w := newWorld(t)
	w.credit("1000")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "3.6")
	s := w.member()
	w.lease(s, time.Hour)
	elsewhere := w.subject(ledger.Member)
	elsewhere.NodeID = db.NewID()
	neighbour, err := w.open(elsewhere)
	require.NoError(t, err)
	w.lease(neighbour, time.Hour)
	earlier := func(rows int, at time.Time) {
		must(w, func(ctx context.Context, tx db.Tx) (int64, error) {
			tag, err := tx.Exec(ctx, `INSERT INTO suspense_records
					(id, node_id, incarnation, sequence, member_id, meter, quantity, started_at, ended_at, reason, created_at)
				SELECT gen_random_uuid(), $1, 'earlier', n, 'm', 'session_seconds', 1, $2, $2, 'malformed', $2
				FROM generate_series(1, $3::int8) AS n`,
				w.node, at, rows)
			return tag.RowsAffected(), err
		})
	}
	w.now = at(3000)
	earlier(50, w.now.Add(-61*time.Minute)) // do not count any more
	earlier(9_998, w.now.Add(-59*time.Minute))
	rows := func(node string) int64 {
		return number(w, `SELECT count(*) FROM suspense_records WHERE node_id = $1 AND incarnation = $2`, node, incarnation)
	}
	sum := func(s ledger.Subject) int64 {
		return number(w, `SELECT coalesce(sum(quantity), 0)::int8 FROM suspense_totals WHERE subject_id = $1`, s.ID)
	}
	// before are five records of ten seconds each before the claim.
	before := func(s ledger.Subject, first uint64) ledger.Segment {
		var records []*protocol.UsageRecord
		for k := range 5 {
			from := -float64(first)*10 - float64(k)*10 - 10
			records = append(records, record(first+uint64(k), s, protocol.MeterSessionSeconds, from, from+10, 10_000_000))
		}
		seg, err := segmentOf(s.NodeID, incarnation, first/5+1, records...)
		require.NoError(t, err)
		return seg
	}
	post := func(segments ...ledger.Segment) {
		for _, posted := range must(w, func(ctx context.Context, tx db.Tx) ([]ledger.Posted, error) {
			return ledger.PostUsage(ctx, tx, w.now, segments...)
		}) {
			require.NoError(t, posted.Err)
			require.True(t, posted.New)
		}
	}
	post(before(s, 1), before(neighbour, 1))
	require.EqualValues(t, 2, rows(w.node))
	require.EqualValues(t, 5, rows(elsewhere.NodeID))
	require.EqualValues(t, 50_000_000, sum(s), "all of it counts against the lease")
	require.EqualValues(t, 50_000_000, sum(neighbour))

	post(before(s, 6), before(neighbour, 6))
	require.EqualValues(t, 2, rows(w.node))
	require.EqualValues(t, 10, rows(elsewhere.NodeID))
	require.EqualValues(t, 100_000_000, sum(s))

	w.now = w.now.Add(2 * time.Minute)
	post(before(s, 11))
	require.EqualValues(t, 7, rows(w.node), "the hour of the earlier ones is over")
	w.checkInvariants()
}
