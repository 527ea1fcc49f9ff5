package db_test

import (
	"testing"

	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest/wire"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// standIn is PostgreSQL that answers as CockroachDB is documented to.
func standIn(t *testing.T) (*db.DB, *wire.Proxy) {
	t.Helper()
	d, p := through(t, wire.Cockroach())
	require.Equal(t, db.CockroachDB, d.Engine())
	return d, p
}

func TestEachRestartThatCockroachDBAsksForIsDone(t *testing.T) {
	for name, c := range map[string]struct {
		breaks   func(*wire.Proxy)
		attempts int
	}{
		"a read in doubt":             {func(p *wire.Proxy) { p.Answer("SELECT n", wire.ReadRestart(), 2) }, 3},
		"a write too old":             {func(p *wire.Proxy) { p.Answer("UPDATE", wire.WriteTooOld(), 3) }, 4},
		"an aborted transaction":      {func(p *wire.Proxy) { p.Answer("UPDATE", wire.Aborted(), 1) }, 2},
		"a refresh failed at commit":  {func(p *wire.Proxy) { p.AnswerCommit(wire.RetrySerializable(), false) }, 2},
		"a write that waited too old": {func(p *wire.Proxy) { p.Answer("INSERT", wire.WriteTooOld(), 1) }, 2},
	} {
		t.Run(name, func(t *testing.T) {
			d, p := standIn(t)
			do(t, d, `CREATE TABLE counters (id INT8 PRIMARY KEY, n INT8 NOT NULL)`)
			do(t, d, `CREATE TABLE rows (id UUID PRIMARY KEY)`)
			do(t, d, `INSERT INTO counters VALUES (1, 0)`)
			signals := 0
			d.OnCommit("q", func(string) { signals++ })
			c.breaks(p)
			attempts := 0
			_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (none, error) {
				attempts++
				tx.Enqueue("q", "item")
				var n int
				if err := tx.QueryRow(t.Context(), `SELECT n FROM counters WHERE id = $1`, 1).Scan(&n); err != nil {
					return none{}, err
				}
				if _, err := tx.Exec(t.Context(), `UPDATE counters SET n = $1 WHERE id = 1`, n+1); err != nil {
					return none{}, err
				}
				return none{}, tx.Queue(t.Context(), `INSERT INTO rows VALUES ($1)`, db.NewID())
			})
			require.NoError(t, err)
			require.Zero(t, p.Pending())
			require.Equal(t, c.attempts, attempts)
			require.Equal(t, 1, signals, "what follows a commit, once")
			require.Equal(t, 1, number(t, d, `SELECT n FROM counters WHERE id = 1`))
			require.Equal(t, 1, number(t, d, `SELECT count(*) FROM rows`))
		})
	}
}

func TestReadsThatCockroachDBRestartsAreReadAgain(t *testing.T) {
	d, p := standIn(t)
	p.Answer("SELECT 1", wire.ReadRestart(), 2)
	require.Equal(t, 1, number(t, d, `SELECT 1`), "in a transaction")
	require.Zero(t, p.Pending())
	p.Answer("SELECT 2", wire.ReadRestart(), 2)
	n, err := db.Query(t.Context(), d, func(tx db.Tx) (int, error) {
		return db.Value[int](t.Context(), tx, `SELECT 2`)
	})
	require.NoError(t, err)
	require.Equal(t, 2, n, "outside one")
	require.Zero(t, p.Pending())
}

func TestACommitOfWhichCockroachDBDoesNotKnowIsAmbiguousAndNotRepeated(t *testing.T) {
	for name, c := range map[string]struct {
		breaks func(*wire.Proxy)
		rows   int
	}{
		"40003, not committed": {func(p *wire.Proxy) { p.AnswerCommit(wire.Ambiguous(), false) }, 0},
		"40003, committed":     {func(p *wire.Proxy) { p.AnswerCommit(wire.Ambiguous(), true) }, 1},
		"cut before":           {func(p *wire.Proxy) { p.CutBefore("RELEASE") }, 0},
		"cut after":            {(*wire.Proxy).CutAfterCommit, 1},
	} {
		t.Run(name, func(t *testing.T) {
			d, p := standIn(t)
			do(t, d, `CREATE TABLE rows (id UUID PRIMARY KEY)`)
			c.breaks(p)
			attempts := 0
			_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (none, error) {
				attempts++
				_, err := tx.Exec(t.Context(), `INSERT INTO rows VALUES ($1)`, db.NewID())
				return none{}, err
			})
			require.ErrorIs(t, err, db.ErrAmbiguousCommit)
			require.EqualValues(t, "commit_ambiguous", fault.As(err).Code)
			require.Zero(t, p.Pending())
			require.Equal(t, 1, attempts)
			require.Equal(t, c.rows, number(t, d, `SELECT count(*) FROM rows`))
		})
	}
}

// CockroachDB answers 40003 to a commit alone. To a statement before it nothing was committed: that may start afresh.
func TestAnAmbiguousStatementBeforeTheCommitStartsAfresh(t *testing.T) {
	d, p := standIn(t)
	do(t, d, `CREATE TABLE rows (id UUID PRIMARY KEY)`)
	p.Answer("INSERT", wire.Ambiguous(), 1)
	do(t, d, `INSERT INTO rows VALUES ($1)`, db.NewID())
	require.Zero(t, p.Pending())
	require.Equal(t, 1, number(t, d, `SELECT count(*) FROM rows`))
}

// Endless restarts end as busy, as on PostgreSQL, and leave nothing.
func TestEndlessRestartsOfCockroachDBEndAsBusy(t *testing.T) {
	for name, e := range map[string]*pgproto3.ErrorResponse{
		"read": wire.ReadRestart(), "write": wire.WriteTooOld(), "abort": wire.Aborted(),
	} {
		t.Run(name, func(t *testing.T) {
			d, p := standIn(t)
			do(t, d, `CREATE TABLE rows (id UUID PRIMARY KEY)`)
			p.Answer("INSERT", e, 1000)
			_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (none, error) {
				_, err := tx.Exec(t.Context(), `INSERT INTO rows VALUES ($1)`, db.NewID())
				return none{}, err
			})
			require.EqualValues(t, "database_busy", fault.As(err).Code)
			require.Less(t, p.Pending(), 1000)
			require.Zero(t, number(t, d, `SELECT count(*) FROM rows`))
		})
	}
}
