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
