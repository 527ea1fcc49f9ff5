// Package power_test cuts the power of nodes: what was not flushed is lost, or one of two disks is older than the
// other.
package power_test

import (
	"testing"

	"github.com/gpuaas/gpuaas/e2e/harness"
)

func TestMain(m *testing.M) { harness.RunTests(m) }
