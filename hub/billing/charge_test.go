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
	added, most := batch.SuspendedTotals()
	key := billing.SuspendedKey{MemberID: "m", Meter: protocol.MeterSessionSeconds}
	require.Equal(t, ran.Length(), added[key])
	require.GreaterOrEqual(t, most[key], ran.Length())
}
