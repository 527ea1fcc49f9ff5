// Package durabletest stands in for a full disk in tests of what writes files.
package durabletest

import (
	"os/signal"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// FillDisk keeps this process from writing to any file until the returned function is called. Tests that use it do not
// run beside others.
func FillDisk(t *testing.T) (free func()) {
	t.Helper()
	var before unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_FSIZE, &before))
	signal.Ignore(unix.SIGXFSZ)
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Max: before.Max}))
	return func() {
		t.Helper()
		require.NoError(t, unix.Setrlimit(unix.RLIMIT_FSIZE, &before))
		signal.Reset(unix.SIGXFSZ)
	}
}
