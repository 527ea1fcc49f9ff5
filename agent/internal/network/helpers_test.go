package network_test

import (
	"context"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// ctxOf outlives the test's own context, which ends before its clean-ups.
func ctxOf(t *testing.T) context.Context { return context.WithoutCancel(t.Context()) }

// sh runs a shell command and returns what it printed.
func sh(t testing.TB, script string) string {
	t.Helper()
	out, err := exec.Command("sh", "-c", script).CombinedOutput()
	require.NoErrorf(t, err, "%s: %s", script, out)
	return strings.TrimSpace(string(out))
}
