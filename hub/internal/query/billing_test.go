package query_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/query"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// What a launch costs is what the estimate said: half a GPU for a slice of two, where the allocation is named.
func TestTheEstimateOfASliceIsWhatItsLaunchCosts(t *testing.T) {
	w, a := withSlices(t)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, err := ledger.CreatePrice(ctx, tx, ledger.Price{
			Meter: protocol.MeterAcceleratorSeconds, Currency: "EUR", Nanos: 5_000_000_001, Per: "hour", From: w.Now,
		}, w.Now)
		return err
	})
	chosen := manifest.Choice{AcceleratorSharing: protocol.SharingTimeSlices}
	estimate := func(allocation string, c manifest.Choice) map[string]int64 {
		e, err := (&query.Service{DB: w.DB}).Estimate(t.Context(), w.User, query.EstimateInput{
			ProjectID: w.Project.ID, AppSlug: "demo", Version: "2.0.0", AllocationID: allocation, Resources: c, Now: w.Now,
		})
		require.NoError(t, err)
		rates := map[string]int64{"": e.PerHourNanos}
		for _, r := range e.Rates {
			rates[r.Meter] = r.PerHourNanos
		}
		return rates
	}
	const session = 3_600_000_000
	rates := func(accelerators int64) map[string]int64 {
		return map[string]int64{
			"": session + accelerators, protocol.MeterSessionSeconds: session, protocol.MeterAcceleratorSeconds: accelerators,
		}
	}
	require.Equal(t, rates(2_500_000_001), estimate(a.ID, chosen), "rounded up, as a hold is")
	require.Equal(t, rates(5_000_000_001), estimate("", chosen), "no slice is known")
	two := 2
	require.Equal(t, rates(10_000_000_002), estimate("", manifest.Choice{Accelerators: &two}))
	require.Equal(t, map[string]int64{"": session, protocol.MeterSessionSeconds: session},
		estimate(a.ID, manifest.Choice{}), "the allocation has no GPU alone")

	in := w.InstanceInput()
	in.Version, in.Resources = "2.0.0", chosen
	i, err := w.Commands().CreateInstance(t.Context(), w.Meta("launch"), in)
	require.NoError(t, err)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		cost, err := ledger.CostOf(ctx, tx, i.ID)
		require.EqualValues(t, session+2_500_000_001, cost.PerHourNanos)
		return err
	})
}
