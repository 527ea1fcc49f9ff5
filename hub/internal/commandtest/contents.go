package commandtest

import (
	"context"
	"encoding/hex"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// Contents is the number of rows and a digest of each table: a changed row shows too.
func (w *World) Contents() map[string]string {
	w.T.Helper()
	return w.tables(`count(*)::TEXT || ' ' || coalesce(md5(string_agg(t::TEXT, '|' ORDER BY t::TEXT)), '')`)
}

// RequireHidden checks that no row of any table holds one of the values, as text or as bytes.
func (w *World) RequireHidden(values ...string) {
	w.T.Helper()
	all := w.tables(`coalesce(string_agg(t::TEXT, '|'), '')`)
	require.Contains(w.T, all["projects"], w.Project.ID, "what is not hidden is found")
	for table, rows := range all {
		for _, value := range values {
			held := strings.Contains(rows, value) || strings.Contains(rows, hex.EncodeToString([]byte(value)))
			require.False(w.T, held, "table %s holds %q", table, value)
		}
	}
}

// tables is the value of an expression over the rows t of each table.
func (w *World) tables(expression string) map[string]string {
	w.T.Helper()
	out := map[string]string{}
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		names, err := db.CollectColumn[string](tx.Query(ctx, `SELECT table_name FROM information_schema.tables
			WHERE table_schema = 'public' AND table_type = 'BASE TABLE' ORDER BY table_name`))
		if err != nil {
			return err
		}
		for _, name := range names {
			var value string
			if err := tx.QueryRow(ctx, `SELECT `+expression+` FROM `+pgx.Identifier{name}.Sanitize()+` t`).
				Scan(&value); err != nil {
				return err
			}
			out[name] = value
		}
		return nil
	})
	return out
}
