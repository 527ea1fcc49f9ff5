package harness

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

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
