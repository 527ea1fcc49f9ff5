package sim_test

import (
	"os"
	"runtime/debug"
	"testing"

	"github.com/gpuaas/gpuaas/e2e/sim"
)

func TestMain(m *testing.M) {
	debug.SetGCPercent(sim.GCPercent)
	os.Exit(m.Run())
}
