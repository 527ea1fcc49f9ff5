package access_test

import (
	"testing"

	"github.com/gpuaas/gpuaas/e2e/harness"
)

func TestMain(m *testing.M) { harness.RunTests(m) }
