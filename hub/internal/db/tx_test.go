package db_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
)

func TestOpenFindsTheEngine(t *testing.T) {
	d := dbtest.New(t)
	require.Equal(t, db.PostgreSQL, d.Engine())
	_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (int, error) {
		var id *string
		var ids []string
		a, b := db.NewID(), db.NewID()
		_, err := tx.Exec(t.Context(), `CREATE TABLE x (id UUID PRIMARY KEY, o UUID)`)
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), `INSERT INTO x VALUES ($1, NULL), ($2, $1)`, a, b)
		require.NoError(t, err)
		require.NoError(t, tx.QueryRow(t.Context(), `SELECT o FROM x WHERE id = $1`, b).Scan(&id))
		require.Equal(t, a, *id)
		require.NoError(t, tx.QueryRow(t.Context(), `SELECT o FROM x WHERE id = $1`, a).Scan(&id))
		require.Nil(t, id)
		require.NoError(t, tx.QueryRow(t.Context(), `SELECT array_agg(id) FROM x WHERE id = ANY($1)`, []string{a, b}).Scan(&ids))
		require.Len(t, ids, 2)
		return 0, nil
	})
	require.NoError(t, err)
}
