package volume_test

import (
	"os"
	"testing"

	"github.com/gpuaas/gpuaas/e2e/sandbox"
)

// TestMain runs the tests in a mount namespace of their own: a namespace that another package's tests make meanwhile
// would have a copy of their mounts, and keep them in use. A killed run leaves no mount and no loop device behind.
func TestMain(m *testing.M) {
	os.Exit(sandbox.RunInTree(m.Run))
}
