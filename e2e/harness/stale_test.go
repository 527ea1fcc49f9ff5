package harness

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// stopped is the test that a failing requirement ends.
type stopped struct {
	testing.TB
	message string
}

func (*stopped) Helper() {}

func (s *stopped) FailNow() { panic(s) }

func (s *stopped) Errorf(format string, args ...any) { s.message = fmt.Sprintf(format, args...) }

func (s *stopped) Fatalf(format string, args ...any) {
	s.Errorf(format, args...)
	s.FailNow()
}

// refusal is what requireCurrent says of a program; empty where it takes the program.
func refusal(t *testing.T, root, program string) string {
	t.Helper()
	s := &stopped{TB: t}
	func() {
		defer func() {
			if p := recover(); p != nil && p != any(s) {
				panic(p)
			}
		}()
		requireCurrent(s, root, program)
	}()
	return s.message
}

func TestAProgramOlderThanItsSourcesIsRefused(t *testing.T) {
	t.Setenv(binEnv, "")
	root, now := t.TempDir(), time.Now().Truncate(time.Second)
	write := func(path string, at time.Time) string {
		path = filepath.Join(root, path)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, nil, 0o600))
		require.NoError(t, os.Chtimes(path, at, at))
		return path
	}
	for _, path := range []string{"agent/a.go", "hub/a.go", "pkg/a.go", "protocol/a.go", "go.sum", "go.mod"} {
		write(path, now.Add(-time.Hour))
	}
	require.Contains(t, refusal(t, root, filepath.Join(root, "bin/gpuaas-hub")), "make build build-failpoint first")
	program := write("bin/gpuaas-hub", now)
	require.Empty(t, refusal(t, root, program))
	changed := write("pkg/a.go", now.Add(time.Second))
	require.Contains(t, refusal(t, root, program), program+" is older than "+changed)
	t.Setenv(binEnv, filepath.Dir(program))
	require.Empty(t, refusal(t, root, program), "GPUAAS_E2E_BIN vouches for its programs")
}

func TestTheNewestFileOfTheProgramsIsFound(t *testing.T) {
	root, at := t.TempDir(), time.Now().Add(-time.Hour).Truncate(time.Second)
	write := func(path string) {
		path = filepath.Join(root, path)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, nil, 0o600))
		at = at.Add(time.Minute)
		require.NoError(t, os.Chtimes(path, at, at))
	}
	for _, path := range []string{"agent/a.go", "hub/a.go", "pkg/a.go", "protocol/a.go", "go.sum", "go.mod"} {
		write(path)
	}
	for _, path := range []string{"hub/db/migrations/1.sql", "agent/policy/new.go", "go.sum"} {
		write(path)
		newest := at
		for _, other := range []string{"hub/a_test.go", "hub/testdata/a.go", "hub/README.md", "e2e/a.go"} {
			write(other) // the programs are not made of these
		}
		found, when, err := newestSource(root)
		require.NoError(t, err)
		require.Equal(t, filepath.Join(root, path), found)
		require.True(t, when.Equal(newest))
	}
}
