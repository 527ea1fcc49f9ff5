package command_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// A price of a misspelt SKU or app would be charged to nobody.
func TestAPriceIsOfAnAppOrSKUThatExists(t *testing.T) {
	w := newWorld(t)
	s := w.Commands()
	_, err := s.CreateSKU(t.Context(), w.Admin("sku"), smallSKU())
	require.NoError(t, err)
	create := func(key, meter, app, sku string) error {
		return second(s.CreatePrice(t.Context(), w.Admin(key), ledger.Price{
			Meter: meter, AppSlug: app, SKU: sku, Currency: "USD", Nanos: 1, Per: "hour",
		}))
	}
	require.Equal(t, fault.NotFound, fault.As(create("1", "allocation_seconds", "", "smal")).Kind)
	require.Contains(t, fault.As(create("2", protocol.MeterSessionSeconds, "dmo", "")).Public, "no such app")
	require.NoError(t, create("3", "allocation_seconds", "", "small"))
	require.NoError(t, create("4", protocol.MeterSessionSeconds, "demo", ""))
	require.NoError(t, create("5", protocol.MeterSessionSeconds, "", ""))
}
