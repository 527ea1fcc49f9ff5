package harness

import (
	"path/filepath"
	"testing"
)

// FailpointBinaries are what `make build-failpoint` made.
func FailpointBinaries(t testing.TB) string {
	t.Helper()
	bin := filepath.Join(Binaries(t), "failpoint")
	for _, b := range []string{"gpuaas-hub", "gpuaas-agent"} {
		requireCurrentOnce(t, Source(t), filepath.Join(bin, b))
	}
	return bin
}
