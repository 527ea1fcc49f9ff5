package db_test

import (
	"bytes"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
)

// A table that is emptied with TRUNCATE is in a dump either with its rows or after all of what emptied it.
func TestDumpHoldsTheRowsOfATableThatIsTruncatedMeanwhile(t *testing.T) {
	d := dbtest.New(t)
	insert := func() {
		do(t, d, `INSERT INTO usage_slots (slot, from_at) VALUES (3, now())`)
		do(t, d,
			`INSERT INTO usage_segments_3 (node_id, incarnation, number, envelope) VALUES (gen_random_uuid(), '', 1, '')`)
	}
	empty := func(tx db.Tx) error {
		for _, statement := range []string{
			`SET LOCAL lock_timeout = '10ms'`, `TRUNCATE TABLE usage_segments_3`,
			`DELETE FROM usage_slots`,
		} {
			if _, err := tx.Exec(t.Context(), statement); err != nil {
				return err
			}
		}
		return nil
	}
	truncate := func() error {
		_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (struct{}, error) { return struct{}{}, empty(tx) })
		return err
	}
	rows := func() (slots, segments int64) {
		require.NoError(t, db.WithDump(t.Context(), d, func(dump *db.Dump) error {
			require.True(t, db.IsLockTimeout(truncate()), "the dump keeps what it has not read yet")
			for _, table := range dump.Tables {
				require.NotEqual(t, "usage_recent", table.Name, "a view is no table")
				n, err := dump.Copy(t.Context(), table, &bytes.Buffer{})
				require.NoError(t, err)
				switch table.Name {
				case "usage_slots":
					slots = n
				case "usage_segments_3":
					segments = n
				}
			}
			require.True(t, slices.ContainsFunc(dump.Tables, func(x db.Table) bool { return x.Name == "usage_segments_3" }))
			return nil
		}))
		return slots, segments
	}
	insert()
	slots, segments := rows()
	require.Equal(t, []int64{1, 1}, []int64{slots, segments})
	d.AfterSnapshotOnce(func() { require.NoError(t, truncate()) })
	slots, segments = rows()
	require.Equal(t, []int64{0, 0}, []int64{slots, segments}, "it starts afresh with what is there now")
}
