package harness_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
)

func TestAnAuditFindsPhantomBillsNeedlessRestartsAndSuspense(t *testing.T) {
	ran := map[string]harness.ContainerProcess{"m.1": {Hostname: "web"}, "m.2": {Hostname: "web"}, "m.3": {Hostname: "db"}}
	for name, c := range map[string]struct {
		seen   harness.Observed
		faults harness.Faults
		finds  string
	}{
		"all explained": {
			harness.Observed{Billed: []string{"m.1", "m.2"}, Processes: ran, Suspense: []string{"late"}},
			harness.Faults{Restarts: 1, Suspense: true},
			"",
		},
		"phantom": {
			harness.Observed{Billed: []string{"m.4"}, Processes: ran}, harness.Faults{Restarts: 1}, "phantom bill",
		},
		"restart":  {harness.Observed{Processes: ran}, harness.Faults{}, "needless restarts: 1"},
		"suspense": {harness.Observed{Suspense: []string{"late"}}, harness.Faults{}, "suspense without a fault: late"},
	} {
		t.Run(name, func(t *testing.T) {
			found := c.seen.Findings(c.faults)
			if c.finds == "" {
				require.Empty(t, found)
				return
			}
			require.Len(t, found, 1)
			require.Contains(t, found[0], c.finds)
		})
	}
}
