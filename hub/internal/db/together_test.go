package db_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
)

// tripsTx counts the statements of each round trip.
type tripsTx struct {
	db.Tx
	trips []int
}

func (t *tripsTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	t.trips = append(t.trips, 1)
	return t.Tx.Query(ctx, sql, args...)
}

func (t *tripsTx) QueryAll(ctx context.Context, list []db.Statement, each func(n int, rows pgx.Rows, err error)) {
	t.trips = append(t.trips, len(list))
	t.Tx.QueryAll(ctx, list, each)
}

func TestIndependentReadsShareTheirRoundTrips(t *testing.T) {
	d := dbtest.New(t)
	read := func(tx db.Tx) error {
		trips := &tripsTx{Tx: tx}
		var (
			sum        int64
			list       []int64
			inner      [2]int64
			took, none int64
		)
		add := func(n int64) func(db.Tx) error {
			return func(tx db.Tx) error {
				v, err := db.Value[int64](t.Context(), tx, `SELECT $1::INT8`, n)
				sum += v
				return err
			}
		}
		require.NoError(t, db.Together(t.Context(), trips, func(tx db.Tx) error {
			return errors.Join(add(1)(tx), add(2)(tx), add(3)(tx))
		}, func(tx db.Tx) (err error) {
			list, err = db.Select(t.Context(), tx, pgx.RowTo[int64], `SELECT generate_series(1, 3)::INT8`)
			return err
		}, func(db.Tx) error {
			return nil
		}, func(tx db.Tx) error {
			return db.Together(t.Context(), tx, func(tx db.Tx) error {
				return tx.QueryRow(t.Context(), `SELECT 10::INT8`).Scan(&inner[0])
			}, func(tx db.Tx) error {
				return tx.QueryRow(t.Context(), `SELECT 20::INT8`).Scan(&inner[1])
			})
		}, func(tx db.Tx) error {
			// Rows that nobody reads to their end are no one else's.
			return tx.QueryRow(t.Context(), `SELECT generate_series(7, 1000)::INT8`).Scan(&took)
		}, func(tx db.Tx) error {
			err := tx.QueryRow(t.Context(), `SELECT 1::INT8 WHERE false`).Scan(&none)
			require.ErrorIs(t, err, pgx.ErrNoRows)
			return nil
		}))
		require.Equal(t, []int{6, 1, 1}, trips.trips)
		require.EqualValues(t, 6, sum)
		require.Equal(t, []int64{1, 2, 3}, list)
		require.Equal(t, [2]int64{10, 20}, inner)
		require.EqualValues(t, 7, took)
		return add(0)(tx)
	}
	require.NoError(t, db.WriteTx(t.Context(), d, read))
	_, err := db.Query(t.Context(), d, func(tx db.Tx) (struct{}, error) { return struct{}{}, read(tx) })
	require.NoError(t, err)
}

func TestWritesOfPartsAndWhatWaitedBeforeThemGoOutInTheirOrder(t *testing.T) {
	d := dbtest.New(t)
	count := `SELECT count(*) FROM togethers`
	require.NoError(t, db.WriteTx(t.Context(), d, func(tx db.Tx) error {
		_, err := tx.Exec(t.Context(), `CREATE TABLE togethers (n INT8 PRIMARY KEY)`)
		return err
	}))
	require.NoError(t, db.WriteTx(t.Context(), d, func(tx db.Tx) error {
		require.NoError(t, tx.Queue(t.Context(), `INSERT INTO togethers VALUES (1)`))
		require.NoError(t, db.Together(t.Context(), tx, func(tx db.Tx) error {
			n, err := db.Value[int64](t.Context(), tx, count)
			require.EqualValues(t, 1, n)
			return errors.Join(err, tx.Queue(t.Context(), `INSERT INTO togethers VALUES (2)`))
		}, func(tx db.Tx) error {
			tag, err := tx.Exec(t.Context(), `INSERT INTO togethers VALUES (3), (4)`)
			require.EqualValues(t, 2, tag.RowsAffected())
			return err
		}))
		n, err := db.Value[int64](t.Context(), tx, count)
		require.EqualValues(t, 4, n)
		return err
	}))
}

func TestTheFirstPartThatFailsNamesTheError(t *testing.T) {
	d := dbtest.New(t)
	first, second := errors.New("first"), errors.New("second")
	value := func(tx db.Tx, sql string) error {
		_, err := db.Value[int64](t.Context(), tx, sql)
		return err
	}
	err := db.WriteTx(t.Context(), d, func(tx db.Tx) error {
		return db.Together(t.Context(), tx,
			func(tx db.Tx) error {
				return errors.Join(value(tx, `SELECT 1::INT8`), value(tx, `SELECT 2::INT8`), first)
			},
			func(db.Tx) error { return second })
	})
	require.ErrorIs(t, err, first)
	require.NotErrorIs(t, err, second)

	err = db.WriteTx(t.Context(), d, func(tx db.Tx) error {
		_ = db.Together(t.Context(), tx,
			func(tx db.Tx) error { return value(tx, `SELECT 1 / 0::INT8`) },
			func(tx db.Tx) error {
				require.Error(t, value(tx, `SELECT 1::INT8`), "after a statement that failed there is no transaction")
				return nil
			})
		return nil
	})
	require.ErrorContains(t, err, "division by zero", "an error that a caller drops does not commit")
}

func TestASerializationFailureInAPartStartsAfresh(t *testing.T) {
	d := dbtest.New(t)
	tries := 0
	require.NoError(t, db.WriteTx(t.Context(), d, func(tx db.Tx) error {
		tries++
		if tries > 1 {
			return nil
		}
		return db.Together(t.Context(), tx, func(tx db.Tx) error {
			_, _ = tx.Exec(t.Context(), `DO $$ BEGIN RAISE EXCEPTION 'lost' USING ERRCODE = '40001'; END $$`)
			return errors.New("not what the database said")
		})
	}))
	require.Equal(t, 2, tries)
}

func TestAPanicInAPartEndsTheOthers(t *testing.T) {
	d := dbtest.New(t)
	require.Panics(t, func() {
		_ = db.WriteTx(t.Context(), d, func(tx db.Tx) error {
			return db.Together(t.Context(), tx, func(tx db.Tx) error {
				_, err := db.Value[int64](t.Context(), tx, `SELECT 1::INT8`)
				return errors.Join(err, func() error { _, err := db.Value[int64](t.Context(), tx, `SELECT 2::INT8`); return err }())
			}, func(db.Tx) error { panic("broken") })
		})
	})
	require.NoError(t, db.WriteTx(t.Context(), d, func(tx db.Tx) error {
		_, err := tx.Exec(t.Context(), `SELECT 1`)
		return err
	}), "the connection is fine")
}
