package db_test

import (
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

type copied struct {
	id   pgtype.UUID
	text string
	n    int64
	at   time.Time
}

const copyCopied = `COPY copied (id, text, n, at, nothing) FROM STDIN BINARY`

func writeCopied(w *db.Row, c *copied) {
	w.UUID(c.id)
	w.Text(c.text)
	w.Int8(c.n)
	w.Time(c.at)
	w.Null()
}

// More than one buffer of rows, of every type and at its edges, comes back as it went.
func TestCopiedRowsComeBackAsTheyWent(t *testing.T) {
	onBothEngines(t, func(t *testing.T, d *db.DB) {
		do(t, d,
			`CREATE TABLE copied (id UUID, text TEXT NOT NULL, n INT8 PRIMARY KEY, at TIMESTAMPTZ NOT NULL, nothing TEXT)`)
		var rows []copied
		for i := range 3000 {
			rows = append(rows, copied{
				db.NewUUID(), strings.Repeat("ä", i%100), int64(i) - 1500,
				time.Unix(int64(i-1500)*1_000_000, int64(i)*1000).UTC(),
			})
		}
		rows[7].id = pgtype.UUID{}
		_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (struct{}, error) {
			return struct{}{}, db.CopyRows(t.Context(), tx, copyCopied, rows, writeCopied)
		})
		require.NoError(t, err)
		back, err := db.ReadTx(t.Context(), d, func(tx db.Tx) (out []copied, err error) {
			all, err := tx.Query(t.Context(), `SELECT id, text, n, at FROM copied WHERE nothing IS NULL ORDER BY n`)
			if err != nil {
				return nil, err
			}
			for all.Next() {
				var c copied
				if err := all.Scan(&c.id, &c.text, &c.n, &c.at); err != nil {
					return nil, err
				}
				out = append(out, c)
			}
			return out, all.Err()
		})
		require.NoError(t, err)
		require.Equal(t, rows, back)
	})
}

func TestRowThatIsThereFailsAllThatAreCopiedWithIt(t *testing.T) {
	onBothEngines(t, func(t *testing.T, d *db.DB) {
		do(t, d,
			`CREATE TABLE copied (id UUID, text TEXT NOT NULL, n INT8 PRIMARY KEY, at TIMESTAMPTZ NOT NULL, nothing TEXT)`)
		rows := []copied{{n: 1, at: time.Now()}, {n: 2, at: time.Now()}, {n: 1, at: time.Now()}}
		_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (struct{}, error) {
			return struct{}{}, db.CopyRows(t.Context(), tx, copyCopied, rows, writeCopied)
		})
		require.True(t, db.IsUniqueViolation(err), "%v", err)
		require.Zero(t, number(t, d, `SELECT count(*) FROM copied`))
	})
}
