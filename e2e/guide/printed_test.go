package guide_test

import (
	"strings"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
)

// runPrinted runs every command with which the demo says how to look further, as a person would who copies the line.
func runPrinted(w *harness.Testbed, out string) {
	w.T.Helper()
	_, rest, found := strings.Cut(out, "To look further:\n")
	require.True(w.T, found, out)
	s := w.Shell("looking-further")
	ran := 0
	for line := range strings.Lines(rest) {
		line = strings.TrimSpace(line)
		if line == "" {
			break
		}
		if line == "make demo-down" {
			continue // it names the demo's own directories; this one is in the test's
		}
		r := s.Run("sh", "-c", line)
		require.Zero(w.T, r.Code, "%s: %s%s", line, r.Out, r.Err)
		require.NotEmpty(w.T, r.Out, line)
		ran++
	}
	require.GreaterOrEqual(w.T, ran, 8)
}
