package ledger_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestAmountsAreDecimalsBothWays(t *testing.T) {
	for text, nanos := range map[string]int64{
		"0": 0, "12.5": 12_500_000_000, "0.000000001": 1, "-3": -3_000_000_000, "9223372036.854775807": math.MaxInt64,
		"-9223372036.854775808": math.MinInt64,
	} {
		got, err := ledger.ParseNanos(text)
		require.NoError(t, err, text)
		require.Equal(t, nanos, got)
		require.Equal(t, text, ledger.FormatNanos(nanos))
	}
	for _, bad := range []string{
		"", ".", "1.", ".5", "1e3", "+1", "1,5", "0.0000000001", "9223372036.854775808", "--1",
		"1-", " 1",
	} {
		_, err := ledger.ParseNanos(bad)
		require.Error(t, err, bad)
	}
	rapid.Check(t, func(rt *rapid.T) {
		nanos := rapid.Int64().Draw(rt, "nanos")
		back, err := ledger.ParseNanos(ledger.FormatNanos(nanos))
		if err != nil || back != nanos {
			rt.Fatalf("%d came back as %d: %v", nanos, back, err)
		}
	})
}

func TestQuantitiesAreShownInTheirUnit(t *testing.T) {
	require.Equal(t, "1.5", ledger.FormatQuantity(protocol.MeterSessionSeconds, 1_500_000))
	require.Equal(t, "0.000001", ledger.FormatQuantity(ledger.MeterAllocationSeconds, 1))
	require.Equal(t, "seconds", ledger.Unit(protocol.MeterCPUSeconds))
	require.Equal(t, "1500000", ledger.FormatQuantity(protocol.MeterMemoryByteSeconds, 1_500_000))
	require.Equal(t, "byte_seconds", ledger.Unit(protocol.MeterMemoryByteSeconds))
	require.Equal(t, "7", ledger.FormatQuantity("tokens", 7))
	require.Equal(t, "unit", ledger.Unit("tokens"))
}
