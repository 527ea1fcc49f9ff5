package billing_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/rating"
	"github.com/gpuaas/gpuaas/protocol"
)

// TestUsageThatARestoredHubCannotBillDoesNotEndALease: a restored hub knows a member only from the lease that its
// node uploaded. The node has counted what ran before against the cap, so the cap must make up for all of it.
func TestUsageThatARestoredHubCannotBillDoesNotEndALease(t *testing.T) {
	noon := time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
	book := billing.NewBook()
	book.Members["m"] = &billing.Member{ID: "m", NodeID: "n", OpenedAt: noon}
	ran := rating.Interval{From: noon.Add(-9 * time.Hour), To: noon}
	record := &billing.Record{
		Store: billing.Store{NodeID: "n", Incarnation: "i1"}, Sequence: 1, MemberID: "m", RunID: "r",
		Meter: protocol.MeterSessionSeconds, Quantity: ran.Length(), Span: ran,
	}
	book.Prepare([]*billing.Record{record})
	batch, err := book.Charge(noon.Add(time.Hour), []*billing.Record{record})
	require.NoError(t, err)
	require.Empty(t, batch.Accepted)
	s := batch.SuspendedTotals()[billing.SuspendedKey{MemberID: "m", Meter: protocol.MeterSessionSeconds}]
	require.Equal(t, ran.Length(), s.Quantity)
	require.Equal(t, billing.SuspendedTotal{Quantity: ran.Length(), Before: ran.Length()}, billing.SuspendedTotal{}.Add(s))
}

// TestEachSegmentFromBeforeTheOpeningCounts: the node uploads the time that the hub has forgotten piece by piece. The
// last piece begins late, and its bound alone would leave it out.
func TestEachSegmentFromBeforeTheOpeningCounts(t *testing.T) {
	noon := time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
	key := billing.SuspendedKey{MemberID: "m", Meter: protocol.MeterSessionSeconds}
	var total billing.SuspendedTotal
	for n := range 9 {
		book := billing.NewBook()
		book.Members["m"] = &billing.Member{ID: "m", NodeID: "n", OpenedAt: noon}
		from := noon.Add(time.Duration(n-9) * time.Hour)
		record := &billing.Record{
			Store: billing.Store{NodeID: "n", Incarnation: "i1"}, Sequence: int64(n + 1), MemberID: "m", RunID: "r",
			Meter: key.Meter, Quantity: time.Hour.Microseconds(),
			Span: rating.Interval{From: from, To: from.Add(time.Hour)},
		}
		book.Prepare([]*billing.Record{record})
		batch, err := book.Charge(noon.Add(time.Minute), []*billing.Record{record})
		require.NoError(t, err)
		total = total.Add(batch.SuspendedTotals()[key])
	}
	require.Equal(t, (9 * time.Hour).Microseconds(), total.Quantity)
}

func TestAcceleratorTimeIsBilledOnceAndForAsManyAsTheMemberHas(t *testing.T) {
	noon := time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
	charge := func(accelerators int64, records ...*billing.Record) (billed int64, reasons []string) {
		book := billing.NewBook()
		book.Members["m"] = &billing.Member{ID: "m", NodeID: "n", OpenedAt: noon, Accelerators: accelerators}
		book.Leases["m"] = billing.NewLeases([]billing.Lease{{
			MemberID: "m", No: 1, NodeID: "n", IssuedAt: noon, ExpiresAt: noon.Add(time.Hour),
		}})
		book.Prepare(records)
		batch, err := book.Charge(noon.Add(time.Hour), records)
		require.NoError(t, err)
		for _, a := range batch.Accepted {
			billed += a.Quantity
		}
		for _, s := range batch.Suspended {
			reasons = append(reasons, s.Piece.Reason)
		}
		return billed, reasons
	}
	record := func(n int64, run string, from, to time.Duration, times int64) *billing.Record {
		span := rating.Interval{From: noon.Add(from), To: noon.Add(to)}
		return &billing.Record{
			Store: billing.Store{NodeID: "n", Incarnation: "i1"}, Sequence: n, MemberID: "m", RunID: run, LeaseNo: 1,
			Meter: protocol.MeterAcceleratorSeconds, Quantity: times * span.Length(), Span: span,
		}
	}
	minute := time.Minute.Microseconds()

	billed, reasons := charge(2, record(1, "r1", 0, time.Minute, 2))
	require.Equal(t, 2*minute, billed)
	require.Empty(t, reasons)
	billed, reasons = charge(2, record(1, "r1", 0, time.Minute, 5))
	require.Equal(t, 2*minute, billed)
	require.Equal(t, []string{billing.SuspenseBeyondLimit}, reasons)
	billed, reasons = charge(2, record(1, "r1", 0, time.Minute, 2), record(2, "r2", 0, time.Minute, 2))
	require.Equal(t, 2*minute, billed, "two containers cannot have the same accelerators at once")
	require.Equal(t, []string{billing.SuspenseAlreadyBilled}, reasons)
	billed, reasons = charge(0, record(1, "r1", 0, time.Minute, 1))
	require.Zero(t, billed)
	require.Equal(t, []string{billing.SuspenseBeyondLimit}, reasons)
}

// A node meters one copy of a service: an hour with an upgrade by start_first costs what any other hour does.
func TestAnHourWithTwoCopiesIsBilledAsOne(t *testing.T) {
	noon := time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
	const limit = 1000 // a whole processor
	charge := func(second time.Duration) (billed map[string]int64, suspended []billing.Suspended) {
		book := billing.NewBook()
		book.Members["m"] = &billing.Member{ID: "m", NodeID: "n", OpenedAt: noon, CPUMillis: limit, MemoryBytes: 1}
		book.Leases["m"] = billing.NewLeases([]billing.Lease{{
			MemberID: "m", No: 1, NodeID: "n", IssuedAt: noon, ExpiresAt: noon.Add(2 * time.Hour),
		}})
		var records []*billing.Record
		add := func(run, meter string, from, to, used time.Duration) {
			const cut = 30 * time.Second
			for at := from; at < to; at += cut {
				records = append(records, &billing.Record{
					Store: billing.Store{NodeID: "n", Incarnation: "i1"}, Sequence: int64(len(records) + 1), MemberID: "m",
					RunID: run, LeaseNo: 1, Meter: meter, Quantity: (used / ((to - from) / cut)).Microseconds(),
					Span: rating.Interval{From: noon.Add(at), To: noon.Add(at + cut)},
				})
			}
		}
		// The second copy starts after half an hour, the first one ends ten minutes later.
		add("r1", protocol.MeterSessionSeconds, 0, 40*time.Minute, 40*time.Minute)
		add("r1", protocol.MeterCPUSeconds, 0, 40*time.Minute, 40*time.Minute)
		add("r2", protocol.MeterSessionSeconds, 40*time.Minute, time.Hour, 20*time.Minute)
		add("r2", protocol.MeterCPUSeconds, 30*time.Minute, time.Hour, second)
		book.Prepare(records)
		batch, err := book.Charge(noon.Add(time.Hour), records)
		require.NoError(t, err)
		billed = map[string]int64{}
		for _, a := range batch.Accepted {
			billed[a.Meter] += a.Quantity
		}
		return billed, batch.Suspended
	}
	billed, suspended := charge(20 * time.Minute)
	require.Empty(t, suspended)
	hour := time.Hour.Microseconds()
	require.Equal(t, map[string]int64{protocol.MeterSessionSeconds: hour, protocol.MeterCPUSeconds: hour}, billed)
	_, suspended = charge(30 * time.Minute)
	require.NotEmpty(t, suspended, "what both used would be more than the member's size")
	require.Equal(t, billing.SuspenseBeyondLimit, suspended[0].Piece.Reason)
}

func TestAChargeOfNothingPostsNothing(t *testing.T) {
	hold := billing.HoldAccount("h")
	for name, c := range map[string]struct {
		delta            rating.Delta
		paid, writtenOff []billing.Leg
	}{
		"nothing": {rating.Delta{}, nil, nil},
		"all to the host": {
			rating.Delta{CollectedNanos: 5, HostNanos: 5},
			[]billing.Leg{
				{Account: hold, Currency: "EUR", Nanos: -5}, {Account: billing.HostAccount("n"), Currency: "EUR", Nanos: 5},
			},
			nil,
		},
		"some to the host": {
			rating.Delta{CollectedNanos: 5, HostNanos: 2},
			[]billing.Leg{
				{Account: hold, Currency: "EUR", Nanos: -5},
				{Account: billing.AccountRevenue, Currency: "EUR", Nanos: 3},
				{Account: billing.HostAccount("n"), Currency: "EUR", Nanos: 2},
			},
			nil,
		},
	} {
		paid, writtenOff := billing.UsageLegs("h", "n", "EUR", c.delta)
		require.Equal(t, c.paid, paid, name)
		require.Equal(t, c.writtenOff, writtenOff, name)
	}
}

// A node's clock may be wrong, and its proof of a removal with it: the hub's own time bounds what it says.
func TestAMemberEndsWhenItsNodeSaysIfThatCanBe(t *testing.T) {
	opened := time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
	now := opened.Add(time.Hour)
	for name, c := range map[string]struct{ said, want time.Time }{
		"while it was open": {opened.Add(time.Minute), opened.Add(time.Minute)},
		"at once":           {opened, opened},
		"1970":              {time.Unix(0, 0), now},
		"a moment before":   {opened.Add(-time.Microsecond), now},
		"this moment":       {now, now},
		"the year 300000":   {time.Date(300000, 1, 1, 0, 0, 0, 0, time.UTC), now},
		"tomorrow":          {now.Add(24 * time.Hour), now},
	} {
		require.Equal(t, c.want, billing.CloseAt(opened, c.said, now), name)
	}
	require.Equal(t, opened, billing.CloseAt(opened, time.Time{}, opened.Add(-time.Minute)), "never before it began")
}
