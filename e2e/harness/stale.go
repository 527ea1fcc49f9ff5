package harness

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// sourceDirs have what the programs are made of, beside go.mod and go.sum.
func sourceDirs() []string { return []string{"agent", "hub", "pkg", "protocol"} }

// current has the programs that this process has found current.
//
//nolint:gochecknoglobals // programs and sources do not change while they are tested
var current sync.Map

// requireCurrentOnce is requireCurrent for the first call of a program: tests call it for each command that they run,
// and it reads the times of a thousand files.
func requireCurrentOnce(t testing.TB, root, program string) {
	t.Helper()
	if _, known := current.Load(program); !known {
		requireCurrent(t, root, program)
		current.Store(program, true)
	}
}

// requireCurrent fails the test where a program is older than a file that it is made of: what would be tested is not
// what the tree says. For programs in another directory, those who name it vouch.
func requireCurrent(t testing.TB, root, program string) {
	t.Helper()
	info, err := os.Stat(program)
	require.NoError(t, err, "run make build build-failpoint first")
	if os.Getenv(binEnv) != "" {
		return
	}
	newest, at, err := newestSource(root)
	require.NoError(t, err)
	if info.ModTime().Before(at) {
		t.Fatalf("%s is older than %s: run make build build-failpoint, or make e2e, which does", program, newest)
	}
}

// newestSource is the file of the programs that was changed last.
func newestSource(root string) (newest string, at time.Time, err error) {
	note := func(path string, d fs.DirEntry) error {
		info, err := d.Info()
		if err == nil && info.ModTime().After(at) {
			newest, at = path, info.ModTime()
		}
		return err
	}
	for _, dir := range sourceDirs() {
		err := filepath.WalkDir(filepath.Join(root, dir), func(path string, d fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case d.IsDir() && slices.Contains([]string{"testdata", "python", "node_modules"}, d.Name()):
				return filepath.SkipDir
			case d.IsDir() || strings.HasSuffix(path, "_test.go") || filepath.Ext(path) == ".md":
				return nil
			}
			return note(path, d)
		})
		if err != nil {
			return "", at, fmt.Errorf("find the newest file of the programs: %w", err)
		}
	}
	for _, name := range []string{"go.mod", "go.sum"} {
		path := filepath.Join(root, name)
		info, err := os.Stat(path)
		if err != nil {
			return "", at, err
		}
		if err := note(path, fs.FileInfoToDirEntry(info)); err != nil {
			return "", at, err
		}
	}
	return newest, at, nil
}
