package skip_test

import (
	"os"
	"os/exec"
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

// lacksEnv makes this program a test program of a machine that lacks something.
const lacksEnv = "SKIP_TEST_LACKS"

func TestAMachineThatLacksSomething(t *testing.T) {
	if os.Getenv(lacksEnv) != "" {
		skip.Lacking(t, "there is no gcc")
	}
}

func TestASkipTurnsTheRunRedWhereEverythingIsRequired(t *testing.T) {
	run := func(requireAll string) (string, error) {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.v", "-test.run=^TestAMachineThatLacksSomething$")
		cmd.Env = append(os.Environ(), lacksEnv+"=1", skip.RequireAll+"="+requireAll)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	out, err := run("")
	require.NoError(t, err, out)
	require.Contains(t, out, "--- SKIP: TestAMachineThatLacksSomething")
	out, err = run("1")
	require.Error(t, err, out)
	require.Contains(t, out, "--- FAIL: TestAMachineThatLacksSomething")
	require.Contains(t, out, "there is no gcc")
}

// make test runs with a Go tool that only prints the variable; make does not run its other prerequisites.
func TestMakeTestRequiresEverythingOfEachTest(t *testing.T) {
	tool := filepath.Join(t.TempDir(), "go")
	require.NoError(t, os.WriteFile(tool, []byte("#!/bin/sh\necho required=$"+skip.RequireAll+" >&2\n"), 0o700))
	prerequisites := []string{"deps", "check", "shallow", "unit", "race-short", "mutants", "e2e"}
	for _, target := range []string{"shallow", "unit", "race-short", "mutants", "e2e"} {
		args := []string{"-C", "../..", "test", "GO=" + tool, "-o", "build", "-o", "build-failpoint", "-o", "demo-app"}
		for _, p := range prerequisites {
			if p != target {
				args = append(args, "-o", p)
			}
		}
		cmd := exec.CommandContext(t.Context(), "make", args...)
		cmd.Env = append(os.Environ(), skip.RequireAll+"=")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Contains(t, string(out), "required=1\n", target)
		require.NotContains(t, string(out), "required=\n", target)
	}
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
