package ledger_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// The platform pays for the allocation that it lends, and the tenant for what its app uses of it.
func TestAnAllocationThatThePlatformLendsPaysForNoTenantsTime(t *testing.T) {
	w := newWorld(t)
	w.credit("100")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "1")
	w.price(ledger.Price{Meter: ledger.MeterAllocationSeconds, SKU: "cpu-small"}, "1")
	s := w.subject(ledger.Member)
	s.OperatingMode = manifest.PlatformManaged
	s, err := w.open(s)
	require.NoError(t, err)
	require.Len(t, w.lease(s, time.Hour).GetPrices(), 1)
}

// While its node is away, a member runs under the lease that it has: what that costs is held, also where the price has
// fallen since.
func TestTheHoldCoversADearerLeaseThatStillRuns(t *testing.T) {
	w := newWorld(t)
	w.credit("1000")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "2")
	s := w.member()
	w.lease(s, 24*time.Hour)
	hours := func(n int) float64 { return float64(n * 3600) }
	w.now = at(hours(12))
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "1")
	w.lease(s, 24*time.Hour)
	w.now = at(hours(37))
	require.NoError(t, do(w, func(ctx context.Context, tx db.Tx) error { return ledger.ReduceHold(ctx, tx, s.ID, w.now) }))
	first, second := w.session(s, 0, hours(24)), w.session(s, hours(24), hours(36))
	second.LeaseNo = 2
	w.post(first, second)
	available, _ := w.wallet()
	w.checkBill()
	require.Empty(t, w.accounts()["platform:write_off"], "the wallet could have paid: it has %s", available)
	require.Equal(t, "60", w.accounts()["platform:revenue"])
}
