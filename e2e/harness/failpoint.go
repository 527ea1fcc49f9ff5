package harness

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// FailpointBinaries are what `make build-failpoint` made.
func FailpointBinaries(t testing.TB) string {
	t.Helper()
	bin := filepath.Join(Binaries(t), "failpoint")
	for _, b := range []string{"gpuaas-hub", "gpuaas-agent"} {
		require.FileExists(t, filepath.Join(bin, b), "run make build-failpoint first")
	}
	return bin
}
