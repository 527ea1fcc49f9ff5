package guide_test

import (
	"strings"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
)

// runPrinted runs every command that the demo prints as a next step, as a person would who copies the line.
func runPrinted(w *harness.Testbed, out string) {
	w.T.Helper()
	_, rest, found := strings.Cut(out, "Next steps:\n")
	require.True(w.T, found, out)
	s := w.Shell("next-steps")
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
