package db_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
)

func TestWhoWatchesATableLearnsOfEachTransactionThatWroteIt(t *testing.T) {
	d := dbtest.New(t)
	do(t, d, `CREATE TABLE t (k TEXT PRIMARY KEY, v INT8)`)
	var wrote int
	d.OnWrite([]string{"other", "t"}, func() { wrote++ })
	d.OnWrite([]string{"other"}, func() { require.Fail(t, "nobody wrote it") })
	for name, write := range map[string]func(ctx context.Context, tx db.Tx) error{
		"exec": func(ctx context.Context, tx db.Tx) error {
			_, err := tx.Exec(ctx, `UPDATE t SET v = v + 1`)
			return err
		},
		"queue": func(ctx context.Context, tx db.Tx) error { return tx.Queue(ctx, `DELETE FROM t WHERE k = 'none'`) },
		"row": func(ctx context.Context, tx db.Tx) error {
			var k string
			return tx.QueryRow(ctx, `INSERT INTO t (k, v) VALUES ('new', 1) RETURNING k`).Scan(&k)
		},
		"together": func(ctx context.Context, tx db.Tx) error {
			one := func(tx db.Tx) error {
				_, err := tx.Exec(ctx, `WITH a AS (SELECT 1) UPDATE t SET v = 2`)
				return err
			}
			return db.Together(ctx, tx, one, one)
		},
	} {
		before := wrote
		require.NoError(t, db.WriteTx(t.Context(), d, func(tx db.Tx) error {
			err := write(t.Context(), tx)
			require.Equal(t, before, wrote, "not before the commit")
			return err
		}), name)
		require.Equal(t, before+1, wrote, "%s: once", name)
	}
	all := wrote
	require.NoError(t, db.WriteTx(t.Context(), d, func(tx db.Tx) error {
		_, err := tx.Exec(t.Context(), `SELECT v FROM t FOR UPDATE`)
		return err
	}))
	require.ErrorIs(t, db.WriteTx(t.Context(), d, func(tx db.Tx) error {
		_, err := tx.Exec(t.Context(), `UPDATE t SET v = 9`)
		require.NoError(t, err)
		return context.Canceled
	}), context.Canceled)
	require.Equal(t, all, wrote, "a read, and a transaction that is rolled back, write nothing")
}
