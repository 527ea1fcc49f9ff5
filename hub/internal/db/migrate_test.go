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
	require.Equal(t, len(migrations(t)),
		number(t, d, `SELECT count(*) FROM goose_db_version WHERE version_id > 0 AND is_applied`))
}

// TestMigrationsCanRunAgain: a file runs outside a transaction, so one that was cut short runs again from its first
// statement.
func TestMigrationsCanRunAgain(t *testing.T) {
	names := regexp.MustCompile(`^[0-9]{14}_[a-z0-9_]+\.sql$`)
	repeatable := regexp.MustCompile(`(?s)IF (NOT )?EXISTS|^ALTER TABLE \w+ ALTER COLUMN \w+ DROP NOT NULL|` +
		`^INSERT .*\sON CONFLICT|^UPDATE |^DELETE FROM |^CREATE OR REPLACE VIEW `)
	numbers := map[string]string{}
	for name, text := range migrations(t) {
		require.Regexp(t, names, name)
		version, _, _ := strings.Cut(name, "_")
		require.Empty(t, numbers[version], "%s has the number of another", name)
		numbers[version] = name
		head, rest, found := strings.Cut(text, "-- +goose Up\n")
		require.True(t, found, name)
		require.Contains(t, head, "-- +goose NO TRANSACTION\n", name)
		for _, statement := range statements(rest) {
			require.Regexp(t, repeatable, statement, "%s must be able to run again", name)
		}
	}
	d := dbtest.New(t)
	for name, text := range migrations(t) {
		up, _, _ := strings.Cut(text, "-- +goose Down")
		for _, statement := range statements(up) {
			_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (struct{}, error) {
				_, err := tx.Exec(t.Context(), statement)
				return struct{}{}, err
			})
			require.NoError(t, err, "%s: %s", name, statement)
		}
	}
}

// migrations returns the text of each file by its name.
func migrations(t *testing.T) map[string]string {
	t.Helper()
	files, err := fs.Glob(db.Migrations(), "*.sql")
	require.NoError(t, err)
	out := map[string]string{}
	for _, name := range files {
		text, err := fs.ReadFile(db.Migrations(), name)
		require.NoError(t, err)
		out[name] = string(text)
	}
	return out
}

// statements returns the statements of a migration without its comments.
func statements(text string) (out []string) {
	up, _, _ := strings.Cut(text, "-- +goose Down")
	var sql strings.Builder
	for line := range strings.Lines(up) {
		if code, _, comment := strings.Cut(line, "--"); comment {
			sql.WriteString(code + "\n")
		} else {
			sql.WriteString(line)
		}
	}
	for statement := range strings.SplitSeq(sql.String(), ";") {
		if statement = strings.TrimSpace(statement); statement != "" {
			out = append(out, statement)
		}
	}
	return out
}
