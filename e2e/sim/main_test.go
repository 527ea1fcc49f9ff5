package sim_test

import (
	"os"
	"runtime/debug"
	"testing"
)

// TestMain lets the heap of a world grow to five times what lives in it: collecting garbage took a fifth of the time.
func TestMain(m *testing.M) {
	debug.SetGCPercent(400)
	os.Exit(m.Run())
}
