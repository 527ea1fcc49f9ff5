package ledger_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/protocol"
)

// slotWorld has a member with a lease for days.
func slotWorld(t *testing.T) (*world, ledger.Subject) {
	w := newWorld(t)
	w.credit("10000")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "3.6")
	s := w.member()
	w.lease(s, billing.MaxLease)
	return w, s
}

// rowsBySlot counts the raw usage in each table of the ring.
func rowsBySlot(w *world) map[int]int64 {
	w.t.Helper()
	out := map[int]int64{}
	for n := range 8 {
		if rows := number(w, fmt.Sprintf(`SELECT count(*) FROM usage_records_%d`, n)); rows > 0 {
			out[n] = rows
		}
	}
	return out
}

func emptyEnded(w *world) (emptied []int64) {
	w.t.Helper()
	return must(w, func(ctx context.Context, tx db.Tx) ([]int64, error) {
		var out []int64
		slots, err := ledger.EndedSlots(ctx, tx, w.now.Add(-ledger.RawUsageRetention))
		for _, s := range slots {
			out = append(out, s.No)
			if err := ledger.EmptySlot(ctx, tx, s); err != nil {
				return nil, err
			}
		}
		return out, err
	})
}

// Raw usage goes round the ring, and each slot is emptied a day after it ended.
func TestRawUsageStaysADayAndThenItsSlotIsEmptied(t *testing.T) {
	w, s := slotWorld(t)
	for hour := range 48 {
		w.now = noon.Add(time.Duration(hour)*time.Hour + time.Minute)
		require.True(t, w.post(w.session(s, float64(hour*3600), float64(hour*3600+30))))
		emptyEnded(w)
		oldest := number(w, `SELECT (extract(epoch FROM $1::timestamptz - min(started_at)) / 60)::int8 FROM usage_recent`,
			w.now)
		want := min(hour, 24+hour%4)
		require.EqualValues(t, want*60+1, oldest, "minutes after %d hours", hour)
		require.EqualValues(t, want+1, number(w, `SELECT count(*) FROM usage_recent`))
		require.LessOrEqual(t, len(rowsBySlot(w)), 7, "one slot is free")
	}
	records, _, err := list(w, ledger.Filter{OrgID: w.org, Limit: 200})
	require.NoError(t, err)
	require.Len(t, records, 24+48%4+4)
}

// Where nothing empties slots, usage goes on into the last one, and nothing is lost.
func TestUsageGoesOnIntoTheCurrentSlotWhereTheNextIsNotEmpty(t *testing.T) {
	w, s := slotWorld(t)
	for hour := range 48 {
		w.now = noon.Add(time.Duration(hour)*time.Hour + time.Minute)
		require.True(t, w.post(w.session(s, float64(hour*3600), float64(hour*3600+30))))
	}
	require.Equal(t, map[int]int64{0: 4, 1: 4, 2: 4, 3: 4, 4: 4, 5: 4, 6: 4, 7: 20}, rowsBySlot(w))
	require.Equal(t, []int64{0, 1, 2, 3, 4}, emptyEnded(w), "each that ended a day ago")
	w.now = w.now.Add(time.Hour)
	require.True(t, w.post(w.session(s, 48*3600, 48*3600+30)))
	require.Equal(t, map[int]int64{0: 1, 5: 4, 6: 4, 7: 20}, rowsBySlot(w))
	w.now = w.now.Add(-12 * time.Hour)
	require.True(t, w.post(w.session(s, 30*3600+60, 30*3600+90)), "a clock that goes back changes no slot")
	require.Equal(t, map[int]int64{0: 2, 5: 4, 6: 4, 7: 20}, rowsBySlot(w))
}

// A page is of the newest rows of all slots, whatever the filter.
func TestListUsageReadsAllSlots(t *testing.T) {
	w, s := slotWorld(t)
	require.True(t, w.post(w.session(s, 0, 0.5)))
	members := []ledger.Subject{s}
	for range 4 {
		members = append(members, w.member())
		w.lease(members[len(members)-1], billing.MaxLease)
	}
	for hour := 1; hour < 24; hour++ {
		w.now = noon.Add(time.Duration(hour)*time.Hour + time.Minute)
		for _, m := range members {
			require.True(t, w.post(w.session(m, float64(hour*3600), float64(hour*3600+30))))
		}
	}
	other := w.subject(ledger.Member)
	other.OrgID, other.ProjectID = db.NewID(), db.NewID()
	_, err := w.open(other)
	require.NoError(t, err)

	want := query(w, `SELECT id::text FROM usage_recent ORDER BY id DESC`,
		func(scan func(...any) error) (id string, err error) { return id, scan(&id) })
	require.Len(t, want, 1+23*5)
	for name, f := range map[string]ledger.Filter{
		"everything": {}, "org": {OrgID: w.org}, "project": {ProjectID: w.proj}, "source": {
			UsageSource: ledger.SourceAppRuntime,
		},
		"all": {
			OrgID: w.org, ProjectID: w.proj, Meter: protocol.MeterSessionSeconds, UsageSource: ledger.SourceAppRuntime,
			From: noon, To: w.now,
		},
	} {
		for _, limit := range []int{1, 2, 7, 200} {
			var got []string
			f.Limit, f.Before = limit, ""
			for {
				records, next, err := list(w, f)
				require.NoError(t, err)
				for _, r := range records {
					require.Equal(t, w.org, r.OrgID)
					got = append(got, r.ID)
				}
				if f.Before = next; next == "" {
					break
				}
			}
			require.Equal(t, want, got, "%s, %d a page", name, limit)
		}
	}
	records, _, err := list(w, ledger.Filter{AppInstanceID: members[2].AppInstanceID, Limit: 200})
	require.NoError(t, err)
	require.Len(t, records, 23)
	for _, f := range []ledger.Filter{
		{OrgID: other.OrgID},
		{OrgID: w.org, UsageSource: ledger.SourceAllocation},
		{OrgID: w.org, Meter: "none"},
	} {
		records, _, err = list(w, f)
		require.NoError(t, err)
		require.Empty(t, records)
	}
}
