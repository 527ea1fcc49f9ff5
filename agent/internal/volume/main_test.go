package volume_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/gpuaas/gpuaas/e2e/sandbox"
)

// TestMain runs the tests in a mount namespace of their own: another package's tests would take their mounts along into
// a new namespace and so keep them in use. A run that is killed leaves no mount and no loop device behind.
func TestMain(m *testing.M) {
	config, err := sandbox.OfTree()
	code := 1
	if err == nil {
		code, err = sandbox.Run(config, m.Run)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}
