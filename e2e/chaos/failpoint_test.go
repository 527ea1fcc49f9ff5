package chaos_test

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
)

// What is shipped cannot be armed: neither the variable that arms nor the name of a point is in it.
func TestTheShippedProgramsHoldNoFailpoints(t *testing.T) {
	// The first of each program stand for all: a search for every name through every program takes its time.
	first := func(program string) string {
		names := failpoint.Names()
		return names[slices.IndexFunc(names, func(n string) bool { return strings.HasPrefix(n, program) })]
	}
	words := []string{"GPUAAS_FAILPOINT", first("agent/"), first("hub/")}
	holds := func(path string) (found []string) {
		program, err := os.ReadFile(path)
		require.NoError(t, err)
		for _, w := range words {
			if bytes.Contains(program, []byte(w)) {
				found = append(found, w)
			}
		}
		return found
	}
	for _, b := range []string{"gpuaas-hub", "gpuaas-agent", "gpuaas"} {
		require.Empty(t, holds(filepath.Join(harness.Binaries(t), b)), b)
	}
	both := append(holds(filepath.Join(harness.FailpointBinaries(t), "gpuaas-hub")),
		holds(filepath.Join(harness.FailpointBinaries(t), "gpuaas-agent"))...)
	require.Subset(t, both, words)
}
