package ledger_test

import (
	"context"
	"encoding/base64"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/protocol"
)

// Segments that come one by one draw on the hold at once and make one posting of each meter and price together.
func TestUsageIsPostedOnceAPostingInterval(t *testing.T) {
	w := newWorld(t)
	w.credit("100")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds, HostBasisPoints: 7000}, "3.6")
	s := w.member()
	w.lease(s, 24*time.Hour)
	w.now = noon.Add(4 * time.Hour)
	postings := func() int64 { return number(w, `SELECT count(*) FROM postings WHERE kind = 'usage'`) }
	for n := range 300 {
		w.post(w.session(s, float64(30*n), float64(30*n+30)))
	}
	require.Zero(t, postings())
	require.EqualValues(t, 9_000_000_000, number(w, `SELECT posted_nanos FROM holds WHERE subject_id = $1`, s.ID),
		"it is charged at once")
	require.Zero(t,
		number(w, `SELECT count(*) FROM usage_recent u WHERE u.posting_id NOT IN (SELECT posting_id FROM pending_postings)`))
	w.checkInvariants()

	require.Equal(t, 1, w.flush())
	require.EqualValues(t, 1, postings())
	require.Zero(t, number(w, `SELECT count(*) FROM usage_recent u WHERE u.posting_id NOT IN (SELECT id FROM postings)`))
	require.Equal(t, "2.7", w.accounts()["platform:revenue"])
	require.Equal(t, "6.3", w.accounts()["host:"+w.node])
	require.Zero(t, w.flush(), "once")

	// What is settled is in the journal, whenever its interval would end.
	w.post(w.session(s, 9000, 9100))
	w.close(s, w.now)
	w.post(w.final(s, 9100))
	require.EqualValues(t, 2, postings())
	require.Zero(t, number(w, `SELECT count(*) FROM pending_postings`))
	w.checkBill()
}

// However a node divides a member's time into runs and segments, an hour has so many records and so much of a limited
// meter.
func TestRecordsOfMadeUpRunsAreInSuspense(t *testing.T) {
	w := newWorld(t)
	w.credit("1000")
	w.price(ledger.Price{Meter: protocol.MeterCPUSeconds}, "3.6")
	s := w.subject(ledger.Member)
	s.CPUMillis, s.MemoryBytes = 1000, 1<<30
	s, err := w.open(s)
	require.NoError(t, err)
	other := w.member()
	w.lease(s, 24*time.Hour)
	w.lease(other, 24*time.Hour)
	w.now = at(7200)
	run := 0
	cpu := func(from, to float64) *protocol.UsageRecord {
		w.seq++
		run++
		r := record(w.seq, s, protocol.MeterCPUSeconds, from, to, at(to).Sub(at(from)).Microseconds())
		r.RunId = fmt.Sprint("run", run)
		return r
	}
	// The same quarter of an hour under ten names: an hour of one core is an hour.
	for range 10 {
		w.post(cpu(0, 900))
	}
	const allowed = int64(3600+180+900) * 1e6
	require.Equal(t, allowed, number(w, `SELECT sum(quantity)::int8 FROM usage_hours WHERE meter = 'cpu_seconds'`))
	require.Equal(t, int64(9000)*1e6-allowed,
		number(w, `SELECT sum(quantity)::int8 FROM suspense_records WHERE reason = $1`, billing.SuspenseBeyondLimit))

	// Slivers of made-up runs, a segment for each hundred.
	for n := range 40 {
		var records []*protocol.UsageRecord
		for m := range 100 {
			records = append(records, cpu(3600+0.001*float64(100*n+m), 3600+0.001*float64(100*n+m)+0.0005))
		}
		w.post(records...)
	}
	require.EqualValues(t, 3600, number(w, `SELECT records FROM usage_hours WHERE hour = $1`, at(3600)))
	require.EqualValues(t, 3600, number(w, `SELECT count(*) FROM usage_recent WHERE started_at >= $1`, at(3600)))
	require.EqualValues(t, 400, number(w, `SELECT count(*) FROM suspense_records WHERE reason = $1`,
		billing.SuspenseTooFragmented))
	w.post(w.session(other, 0, 3600))
	require.EqualValues(t, 3600_000_000, number(w, `SELECT sum(quantity)::int8 FROM usage_hours WHERE subject_id = $1`,
		other.ID), "its neighbour's is accepted")
	w.checkBill()
}

// Every page of every filter together is all hours, once, newest first, and they sum to what was accepted.
func TestHoursAreListedByPages(t *testing.T) {
	w := newWorld(t)
	priced(w)
	all := streams(w, rand.New(rand.NewPCG(3, 4)), 4)
	w.now = noon.Add(23 * time.Hour)
	for _, st := range all {
		for _, seg := range st.segments {
			w.post(seg...)
		}
	}
	list := func(f ledger.Filter) (rows []ledger.UsageHour) {
		for {
			var next string
			page := must(w, func(ctx context.Context, tx db.Tx) (page []ledger.UsageHour, err error) {
				page, next, err = ledger.ListHours(ctx, tx, f)
				return page, err
			})
			require.LessOrEqual(t, len(page), f.Limit)
			rows = append(rows, page...)
			if f.Before = next; next == "" {
				return rows
			}
		}
	}
	total := number(w, `SELECT count(*) FROM usage_hours`)
	rows := list(ledger.Filter{OrgID: w.org, Limit: 3})
	require.Len(t, rows, int(total))
	seen, charged := map[string]bool{}, int64(0)
	for i, r := range rows {
		require.False(t, i > 0 && rows[i-1].Hour.Before(r.Hour), "newest first")
		key := fmt.Sprint(r.SubjectID, r.Hour, r.Meter, r.PriceID)
		require.False(t, seen[key])
		seen[key] = true
		require.Equal(t, "EUR", r.Currency)
		charged += r.ChargedNanos
	}
	require.Equal(t, number(w, `SELECT sum(charged_nanos)::int8 FROM usage_hours`), charged)

	require.Equal(t, rows, list(ledger.Filter{ProjectID: w.proj, Limit: 200}))
	mine := list(ledger.Filter{AppInstanceID: all[0].subject.AppInstanceID, Meter: protocol.MeterCPUSeconds, Limit: 1})
	require.NotEmpty(t, mine)
	for _, r := range mine {
		require.Equal(t, all[0].subject.ID, r.SubjectID)
		require.Equal(t, protocol.MeterCPUSeconds, r.Meter)
	}
	early := list(ledger.Filter{OrgID: w.org, To: noon.Add(time.Hour), Limit: 200})
	late := list(ledger.Filter{OrgID: w.org, From: noon.Add(time.Hour), Limit: 200})
	require.Equal(t, rows, append(late, early...))
	require.Empty(t, list(ledger.Filter{OrgID: db.NewID(), Limit: 9}))
	noText := `{"h":"2026-01-01T00:00:00Z","s":"` + db.NewID() + `","m":"\u0000","p":"` + db.NewID() + `"}`
	for _, cursor := range []string{"nonsense", base64.RawURLEncoding.EncodeToString([]byte(noText))} {
		_, err := run(w, func(ctx context.Context, tx db.Tx) ([]ledger.UsageHour, error) {
			rows, _, err := ledger.ListHours(ctx, tx, ledger.Filter{Before: cursor})
			return rows, err
		})
		require.Equal(t, "cursor_invalid", faultCode(err))
	}
}

// A range that ends within an hour has all of that hour, also of what was opened later in it.
func TestAnHourIsListedWhole(t *testing.T) {
	w := newWorld(t)
	w.credit("10")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "1")
	w.now = at(1800)
	s := w.member()
	w.lease(s, 24*time.Hour)
	w.now = at(7200)
	w.post(w.session(s, 1800, 5400))
	for _, test := range []struct {
		to    float64
		hours int
	}{{0, 0}, {600, 1}, {3600, 1}, {3601, 2}} {
		rows := must(w, func(ctx context.Context, tx db.Tx) ([]ledger.UsageHour, error) {
			rows, _, err := ledger.ListHours(ctx, tx, ledger.Filter{OrgID: w.org, To: at(test.to), Limit: 9})
			return rows, err
		})
		require.Len(t, rows, test.hours, "to %v s after noon", test.to)
	}
}

// Usage without a price adds up in its hours and costs nothing.
func TestUsageWithoutAPriceIsCounted(t *testing.T) {
	w := newWorld(t)
	w.credit("10")
	w.price(ledger.Price{Meter: protocol.MeterCPUSeconds}, "1")
	s := w.member()
	w.lease(s, 24*time.Hour)
	w.now = at(7200)
	w.post(w.session(s, 1800, 5400))
	rows := query(w,
		`SELECT hour::text || ' ' || quantity || ' ' || charged_nanos || ' ' || records FROM usage_hours ORDER BY hour`,
		func(scan func(...any) error) (row string, err error) {
			err = scan(&row)
			return row, err
		})
	require.Len(t, rows, 2)
	require.Contains(t, rows[0], " 1800000000 0 1")
	require.Contains(t, rows[1], " 1800000000 0 0")
	require.Zero(t, number(w, `SELECT count(*) FROM pending_postings`))
	w.checkBill()
}
