package httpapi

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	hubapi "github.com/gpuaas/gpuaas/hub/api"
	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// TestLaw12BadInputChangesNoRow sends the bad requests of every operation to the REST face over a real database:
// afterwards every table is as it was, but for the audit trail, which has one row for each.
func TestLaw12BadInputChangesNoRow(t *testing.T) {
	h := newHouse(t)
	operations, err := loadContract(hubapi.OpenAPI)
	require.NoError(t, err)
	before := fingerprint(t, h.d)
	audited := 0
	for _, key := range slices.Sorted(maps.Keys(operations)) {
		op := operations[key]
		for _, bad := range badInputs(t, op) {
			if bad.status == http.StatusUnauthorized {
				continue // counted by address; TestGuessingCredentialsIsLimitedByAddress has them
			}
			if op.open {
				h.wait(time.Minute) // these count by address, and one a minute has a row
			}
			r := httptest.NewRequest(op.method, bad.path, strings.NewReader(bad.body))
			r.Header.Set("Authorization", "Bearer "+h.admin)
			r.Header.Set("X-Idempotency-Key", "key-1")
			if bad.body != "" {
				r.Header.Set("Content-Type", "application/json")
			}
			maps.Copy(r.Header, bad.header)
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			require.Equal(t, bad.status, w.Code, "%s, %s: %s", op.id, bad.name, w.Body)
			if op.mutates() {
				audited++
			}
		}
	}
	after := fingerprint(t, h.d)
	require.Equal(t, before["audit_rows"].rows+audited, after["audit_rows"].rows)
	delete(before, "audit_rows")
	delete(after, "audit_rows")
	require.Equal(t, before, after)
}

type content struct {
	rows int
	// hash changes with any value in any row.
	hash string
}

// fingerprint knows every table's content.
func fingerprint(t *testing.T, d *db.DB) map[string]content {
	t.Helper()
	ctx := t.Context()
	out, err := db.ReadTx(ctx, d, func(tx db.Tx) (map[string]content, error) {
		tables, err := tableNames(ctx, tx)
		out := map[string]content{}
		for _, name := range tables {
			var c content
			// The name comes from the catalogue of the database itself.
			sql := fmt.Sprintf(
				`SELECT count(*), coalesce(md5(string_agg(md5(t::text), '' ORDER BY md5(t::text))), '') FROM %q t`, name)
			if err := tx.QueryRow(ctx, sql).Scan(&c.rows, &c.hash); err != nil {
				return nil, err
			}
			out[name] = c
		}
		return out, err
	})
	require.NoError(t, err)
	require.Contains(t, out, "idempotency")
	return out
}

func tableNames(ctx context.Context, tx db.Tx) ([]string, error) {
	rows, err := tx.Query(ctx,
		`SELECT table_name::text FROM information_schema.tables WHERE table_schema = 'public' ORDER BY 1`)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var names []string
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			return nil, err
		}
		names = append(names, name)
	}
	return names, rows.Err()
}
