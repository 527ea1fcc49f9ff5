package ledger_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

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
