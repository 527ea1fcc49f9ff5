package skip_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/skip"
)

// recorder is a test that notes how it ended.
type recorder struct {
	testing.TB
	failed, skipped bool
}

func (*recorder) Helper()                 {}
func (*recorder) Name() string            { return "TestOfIt" }
func (r *recorder) Skip(...any)           { r.skipped = true }
func (r *recorder) Fatalf(string, ...any) { r.failed = true; panic(r) }

func ended(t *testing.T, test func(testing.TB)) *recorder {
	t.Helper()
	r := &recorder{TB: t}
	func() {
		defer func() {
			if p := recover(); p != nil && p != any(r) {
				panic(p)
			}
		}()
		test(r)
	}()
	return r
}

func TestWhatAMachineLacksIsAFailureWhereEverythingIsRequired(t *testing.T) {
	lacking := func(tb testing.TB) { skip.Lacking(tb, "there is no gcc") }
	t.Setenv(skip.RequireAll, "")
	require.True(t, ended(t, lacking).skipped)
	t.Setenv(skip.RequireAll, "1")
	r := ended(t, lacking)
	require.True(t, r.failed)
	require.False(t, r.skipped)
}

func TestAnExceptionIsReported(t *testing.T) {
	path := filepath.Join(t.TempDir(), "skipped")
	t.Setenv(skip.RequireAll, "1")
	t.Setenv(skip.Report, path)
	for range 2 {
		require.True(t, ended(t, func(tb testing.TB) { skip.Except(tb, skip.NoRelease, "none") }).skipped)
	}
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	line := "TestOfIt: " + string(skip.NoRelease) + ": none\n"
	require.Equal(t, line+line, string(text))
}
