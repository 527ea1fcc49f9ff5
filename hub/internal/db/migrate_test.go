package db_test

import (
	"io/fs"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
)

func TestHubsThatStartAtOnceMigrateOnce(t *testing.T) {
	url := dbtest.EmptyURL(t)
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			d, err := db.Open(t.Context(), url)
			if err != nil {
				t.Error(err)
				return
			}
			defer d.Close()
			if err := db.Migrate(t.Context(), d); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	d, err := db.Open(t.Context(), url)
	require.NoError(t, err)
	defer d.Close()
	require.NoError(t, db.Migrate(t.Context(), d), "and again changes nothing")
	files, err := fs.Glob(db.Migrations(), "*.sql")
	require.NoError(t, err)
	require.Equal(t, len(files), number(t, d, `SELECT count(*) FROM goose_db_version WHERE version_id > 0 AND is_applied`))
}

// TestMigrationsKeepTheHouseRules: outside transactions a file cannot be undone half-way, so it holds one statement and
// may run again.
func TestMigrationsKeepTheHouseRules(t *testing.T) {
	names := regexp.MustCompile(`^[0-9]{5}_[a-z0-9_]+\.sql$`)
	files, err := fs.Glob(db.Migrations(), "*.sql")
	require.NoError(t, err)
	numbers := map[string]string{}
	for _, name := range files {
		require.Regexp(t, names, name)
		require.Empty(t, numbers[name[:5]], "%s has the number of another", name)
		numbers[name[:5]] = name
		raw, err := fs.ReadFile(db.Migrations(), name)
		require.NoError(t, err)
		text := string(raw)
		head, rest, found := strings.Cut(text, "-- +goose Up\n")
		require.True(t, found, name)
		require.Contains(t, head, "-- +goose NO TRANSACTION\n", name)
		up, _, _ := strings.Cut(rest, "-- +goose Down")
		var sql strings.Builder
		for line := range strings.Lines(up) {
			if code, _, _ := strings.Cut(line, "--"); strings.TrimSpace(code) != "" {
				sql.WriteString(code)
			}
		}
		statement := strings.TrimSpace(sql.String())
		require.Equal(t, 1, strings.Count(statement, ";"), "%s holds one statement", name)
		require.True(t, strings.HasSuffix(statement, ";"), name)
		require.Regexp(t,
			`(?s)IF (NOT )?EXISTS|^ALTER TABLE \w+ ALTER COLUMN \w+ DROP NOT NULL|^INSERT .*\sON CONFLICT|^UPDATE |^DELETE `+
				`FROM |^CREATE OR REPLACE VIEW `, statement, "%s must be able to run again", name)
	}
}
