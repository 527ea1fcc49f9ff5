package db_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

type none = struct{}

// onBothEngines runs the same promises against PostgreSQL, PostgreSQL that answers as CockroachDB and, where its
// program is there, CockroachDB.
func onBothEngines(t *testing.T, test func(t *testing.T, d *db.DB)) {
	t.Helper()
	t.Run("postgresql", func(t *testing.T) { test(t, dbtest.New(t)) })
	t.Run("cockroachdb's stand-in", func(t *testing.T) {
		d, _ := standIn(t)
		test(t, d)
	})
	t.Run("cockroachdb", func(t *testing.T) { test(t, cockroach(t)) })
}

// cockroach starts a CockroachDB in memory and migrates it.
func cockroach(t *testing.T) *db.DB {
	t.Helper()
	program, err := exec.LookPath("cockroach")
	if err != nil {
		skip.Except(t, skip.NoCockroachDB, "")
	}
	urlFile := t.TempDir() + "/url"
	cmd := exec.Command(program, "start-single-node", "--insecure", "--store=type=mem,size=640MiB",
		"--listen-addr=127.0.0.1:0", "--http-addr=127.0.0.1:0", "--listening-url-file="+urlFile)
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	var d *db.DB
	require.Eventually(t, func() bool {
		url, err := os.ReadFile(urlFile)
		if err != nil || len(url) == 0 {
			return false
		}
		d, err = db.Open(t.Context(), string(url))
		return err == nil
	}, time.Minute, 50*time.Millisecond, "CockroachDB answers")
	t.Cleanup(d.Close)
	require.NoError(t, db.Migrate(t.Context(), d))
	return d
}

func do(t *testing.T, d *db.DB, sql string, args ...any) {
	t.Helper()
	_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (none, error) {
		_, err := tx.Exec(t.Context(), sql, args...)
		return none{}, err
	})
	require.NoError(t, err)
}

func number(t *testing.T, d *db.DB, sql string, args ...any) int {
	t.Helper()
	n, err := db.ReadTx(t.Context(), d, func(tx db.Tx) (n int, err error) {
		err = tx.QueryRow(t.Context(), sql, args...).Scan(&n)
		return n, err
	})
	require.NoError(t, err)
	return n
}

// TestNeitherEngineLosesAWrite is the proof behind RunTx: every increment that RunTx reported as done is in the sum,
// although all of them read, think and write the same row at the same time.
func TestNeitherEngineLosesAWrite(t *testing.T) {
	onBothEngines(t, func(t *testing.T, d *db.DB) {
		do(t, d, `CREATE TABLE counters (id INT8 PRIMARY KEY, n INT8 NOT NULL)`)
		do(t, d, `INSERT INTO counters VALUES (1, 0), (2, 0)`)
		const workers, each = 8, 25
		var wg sync.WaitGroup
		var mu sync.Mutex
		reported := 0
		for w := range workers {
			wg.Go(func() {
				for range each {
					_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (none, error) {
						// Read one row, write the other: a blind UPDATE would be right at any isolation level.
						var n int
						if err := tx.QueryRow(t.Context(), `SELECT n FROM counters WHERE id = $1`, 1+w%2).Scan(&n); err != nil {
							return none{}, err
						}
						var other int
						if err := tx.QueryRow(t.Context(), `SELECT n FROM counters WHERE id = $1`, 2-w%2).Scan(&other); err != nil {
							return none{}, err
						}
						_, err := tx.Exec(t.Context(), `UPDATE counters SET n = $2 WHERE id = $1`, 1+w%2, n+1)
						return none{}, err
					})
					switch {
					case err == nil:
						mu.Lock()
						reported++
						mu.Unlock()
					case !fault.Is(err, fault.Unavailable):
						t.Errorf("worker %d: %v", w, err)
					}
				}
			})
		}
		wg.Wait()
		require.Positive(t, reported)
		require.Equal(t, reported, number(t, d, `SELECT SUM(n)::INT8 FROM counters`))
	})
}

// TestConflictThatShowsAtCommitIsTriedAgain is the case that a library for the other engine drops in silence.
func TestConflictThatShowsAtCommitIsTriedAgain(t *testing.T) {
	onBothEngines(t, func(t *testing.T, d *db.DB) {
		do(t, d, `CREATE TABLE duty (doctor TEXT PRIMARY KEY, present BOOL NOT NULL)`)
		do(t, d, `INSERT INTO duty VALUES ('a', true), ('b', true)`)
		leave := func(who string, during func(attempt int)) (attempts int, gone bool) {
			gone, err := db.RunTx(t.Context(), d, func(tx db.Tx) (bool, error) {
				attempts++
				var present int
				if err := tx.QueryRow(t.Context(), `SELECT count(*) FROM duty WHERE present`).Scan(&present); err != nil {
					return false, err
				}
				during(attempts)
				if present < 2 {
					return false, nil
				}
				_, err := tx.Exec(t.Context(), `UPDATE duty SET present = false WHERE doctor = $1`, who)
				return true, err
			})
			require.NoError(t, err)
			return attempts, gone
		}
		attempts, gone := leave("a", func(attempt int) {
			if attempt == 1 {
				_, other := leave("b", func(int) {})
				require.True(t, other)
			}
		})
		require.Equal(t, 2, attempts)
		require.False(t, gone, "b went first, so a stays")
		require.Equal(t, 1, number(t, d, `SELECT count(*) FROM duty WHERE present`))
	})
}

func TestConflictThatTheCallerHidIsStillTriedAgain(t *testing.T) {
	d := dbtest.New(t)
	do(t, d, `CREATE TABLE counters (id INT8 PRIMARY KEY, n INT8 NOT NULL)`)
	do(t, d, `INSERT INTO counters VALUES (1, 0)`)
	for name, hide := range map[string]error{"as success": nil, "as absent": fault.New(fault.NotFound, "not_found", "no",
		nil)} {
		attempts := 0
		_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (none, error) {
			attempts++
			var n int
			require.NoError(t, tx.QueryRow(t.Context(), `SELECT n FROM counters WHERE id = 1`).Scan(&n))
			if attempts == 1 {
				do(t, d, `UPDATE counters SET n = n + 1 WHERE id = 1`)
			}
			if _, err := tx.Exec(t.Context(), `UPDATE counters SET n = $1 WHERE id = 1`, n+1); err != nil {
				return none{}, hide
			}
			return none{}, nil
		})
		require.NoError(t, err, name)
		require.Equal(t, 2, attempts, name)
	}
	require.Equal(t, 4, number(t, d, `SELECT n FROM counters`))
}

func TestCommitWithoutAnAnswerIsAmbiguousAndNotRepeated(t *testing.T) {
	d := dbtest.New(t)
	do(t, d, `CREATE TABLE rows (id UUID PRIMARY KEY)`)
	d.BreakCommitOnce(t.Context())
	attempts := 0
	_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (none, error) {
		attempts++
		_, err := tx.Exec(t.Context(), `INSERT INTO rows VALUES ($1)`, db.NewID())
		return none{}, err
	})
	require.ErrorIs(t, err, db.ErrAmbiguousCommit)
	require.EqualValues(t, "commit_ambiguous", fault.As(err).Code)
	require.Equal(t, 1, attempts, "only the caller knows whether doing it again is right")
	do(t, d, `INSERT INTO rows VALUES ($1)`, db.NewID())
}

func TestQueryIsRepeatedWhenItsCommitHasNoAnswer(t *testing.T) {
	d := dbtest.New(t)
	d.BreakCommitOnce(t.Context())
	require.Equal(t, 1, number(t, d, `SELECT 1`))
}

func TestConnectionLostBeforeCommitIsTriedAgain(t *testing.T) {
	d := dbtest.New(t)
	do(t, d, `CREATE TABLE rows (id UUID PRIMARY KEY)`)
	attempts := 0
	_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (none, error) {
		attempts++
		if attempts == 1 {
			_, err := tx.Exec(t.Context(), `SELECT pg_terminate_backend(pg_backend_pid())`)
			return none{}, err
		}
		_, err := tx.Exec(t.Context(), `INSERT INTO rows VALUES ($1)`, db.NewID())
		return none{}, err
	})
	require.NoError(t, err)
	require.Equal(t, 2, attempts)
	require.Equal(t, 1, number(t, d, `SELECT count(*) FROM rows`))
}

func TestErrorOrPanicLeavesNothingBehind(t *testing.T) {
	onBothEngines(t, func(t *testing.T, d *db.DB) {
		do(t, d, `CREATE TABLE rows (id UUID PRIMARY KEY)`)
		wrong := errors.New("wrong")
		_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (none, error) {
			_, err := tx.Exec(t.Context(), `INSERT INTO rows VALUES ($1)`, db.NewID())
			require.NoError(t, err)
			return none{}, wrong
		})
		require.Equal(t, wrong, err, "the caller's own error comes back as it is")
		for range 40 { // more often than the pool has connections
			require.Panics(t, func() {
				_, _ = db.RunTx(t.Context(), d, func(tx db.Tx) (none, error) {
					_, err := tx.Exec(t.Context(), `INSERT INTO rows VALUES ($1)`, db.NewID())
					require.NoError(t, err)
					panic("boom")
				})
			})
		}
		require.Zero(t, number(t, d, `SELECT count(*) FROM rows`))
	})
}

func TestStatementThatFailedUnnoticedFailsTheTransaction(t *testing.T) {
	d := dbtest.New(t)
	do(t, d, `CREATE TABLE rows (id INT8 PRIMARY KEY)`)
	_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (none, error) {
		_, _ = tx.Exec(t.Context(), `INSERT INTO rows VALUES (1), (1)`)
		return none{}, nil
	})
	require.Error(t, err)
	require.Zero(t, number(t, d, `SELECT count(*) FROM rows`))
	do(t, d, `INSERT INTO rows VALUES (1)`)
	_, err = db.RunTx(t.Context(), d, func(tx db.Tx) (none, error) {
		_, err := tx.Exec(t.Context(), `INSERT INTO rows VALUES (1)`)
		return none{}, err
	})
	require.True(t, db.IsUniqueViolation(err))
}

func TestReadTxCannotWriteAndSeesOneMoment(t *testing.T) {
	onBothEngines(t, func(t *testing.T, d *db.DB) {
		do(t, d, `CREATE TABLE rows (id UUID PRIMARY KEY)`)
		_, err := db.ReadTx(t.Context(), d, func(tx db.Tx) (none, error) {
			_, err := tx.Exec(t.Context(), `INSERT INTO rows VALUES ($1)`, db.NewID())
			return none{}, err
		})
		require.ErrorContains(t, err, "read-only")
		_, err = db.ReadTx(t.Context(), d, func(tx db.Tx) (none, error) {
			var before, after int
			require.NoError(t, tx.QueryRow(t.Context(), `SELECT count(*) FROM rows`).Scan(&before))
			do(t, d, `INSERT INTO rows VALUES ($1)`, db.NewID())
			require.NoError(t, tx.QueryRow(t.Context(), `SELECT count(*) FROM rows`).Scan(&after))
			require.Equal(t, before, after)
			return none{}, nil
		})
		require.NoError(t, err)
	})
}

func TestEndlessConflictEndsAsBusy(t *testing.T) {
	d := dbtest.New(t)
	do(t, d, `CREATE TABLE counters (id INT8 PRIMARY KEY, n INT8 NOT NULL)`)
	do(t, d, `INSERT INTO counters VALUES (1, 0)`)
	_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (none, error) {
		var n int
		require.NoError(t, tx.QueryRow(t.Context(), `SELECT n FROM counters`).Scan(&n))
		do(t, d, `UPDATE counters SET n = n + 1`)
		_, err := tx.Exec(t.Context(), `UPDATE counters SET n = $1`, n+1)
		return none{}, err
	})
	require.EqualValues(t, "database_busy", fault.As(err).Code)
	require.Positive(t, fault.As(err).RetryDelay)
}

func TestCancelledRequestEndsItsTransaction(t *testing.T) {
	d := dbtest.New(t)
	ctx, cancel := context.WithCancel(t.Context())
	_, err := db.RunTx(ctx, d, func(tx db.Tx) (none, error) {
		cancel()
		_, err := tx.Exec(ctx, `SELECT 1`)
		return none{}, err
	})
	require.ErrorIs(t, err, context.Canceled)
	_, err = db.RunTx(ctx, d, func(db.Tx) (none, error) { return none{}, nil })
	require.True(t, fault.Is(err, fault.Unavailable), "%v", err)
}

func TestIDsAndTimesComeBackAsTheyWent(t *testing.T) {
	onBothEngines(t, func(t *testing.T, d *db.DB) {
		do(t, d, `CREATE TABLE rows (id UUID PRIMARY KEY, other UUID, at TIMESTAMPTZ)`)
		a, b := db.NewID(), db.NewID()
		require.True(t, db.IsID(a))
		require.Less(t, a, b, "ids follow the order of their making")
		at := time.Date(2026, 11, 20, 11, 0, 0, 123456000, time.FixedZone("x", 3600))
		do(t, d, `INSERT INTO rows VALUES ($1, NULL, $3), ($2, $1, NULL)`, a, b, at)
		_, err := db.ReadTx(t.Context(), d, func(tx db.Tx) (none, error) {
			var other *string
			var when time.Time
			require.NoError(t, tx.QueryRow(t.Context(), `SELECT other FROM rows WHERE id = $1`, b).Scan(&other))
			require.Equal(t, a, *other)
			require.NoError(t, tx.QueryRow(t.Context(), `SELECT other, at FROM rows WHERE id = $1`, a).Scan(&other, &when))
			require.Nil(t, other)
			require.Equal(t, at.UTC(), when)
			var ids []string
			require.NoError(t, tx.QueryRow(t.Context(), `SELECT array_agg(id ORDER BY id) FROM rows WHERE id = ANY($1)`,
				[]string{b, a}).Scan(&ids))
			require.Equal(t, []string{a, b}, ids)
			return none{}, nil
		})
		require.NoError(t, err)
	})
	for _, bad := range []string{
		"", "x", "0192F0C0-0000-7000-8000-000000000001", "{0192f0c0-0000-7000-8000-000000000001}",
		"urn:uuid:0192f0c0-0000-7000-8000-000000000001", "0192f0c0000070008000000000000001",
	} {
		require.False(t, db.IsID(bad), bad)
	}
}

func TestOpenSaysWhatIsWrong(t *testing.T) {
	for url, code := range map[string]string{
		"postgres://user:hush@%zz":                        "database_url_invalid",
		"postgres://user:hush@127.0.0.1:1/x?sslmode=bad":  "database_url_invalid",
		"postgres://user:hush@127.0.0.1:1/x":              "database_unavailable",
		fmt.Sprintf("postgres:///x?host=%s", t.TempDir()): "database_unavailable",
	} {
		_, err := db.Open(t.Context(), url)
		require.EqualValues(t, code, fault.As(err).Code, url)
		require.NotContains(t, err.Error(), "hush")
	}
}

func TestQueryWritesNothingAndOutlivesALostConnection(t *testing.T) {
	d := dbtest.New(t)
	do(t, d, `CREATE TABLE rows (id INT8 PRIMARY KEY)`)
	_, err := db.Query(t.Context(), d, func(tx db.Tx) (none, error) {
		_, err := tx.Exec(t.Context(), `INSERT INTO rows VALUES (1)`)
		return none{}, err
	})
	require.ErrorContains(t, err, "does not write")
	attempts := 0
	n, err := db.Query(t.Context(), d, func(tx db.Tx) (n int, err error) {
		if attempts++; attempts == 1 {
			return 0, tx.QueryRow(t.Context(), `SELECT pg_terminate_backend(pg_backend_pid())`).Scan(new(bool))
		}
		err = tx.QueryRow(t.Context(), `SELECT count(*) FROM rows`).Scan(&n)
		return n, err
	})
	require.NoError(t, err)
	require.Equal(t, 2, attempts)
	require.Zero(t, n)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = db.Query(ctx, d, func(tx db.Tx) (none, error) {
		return none{}, tx.QueryRow(ctx, `SELECT 1`).Scan(new(int))
	})
	require.True(t, fault.Is(err, fault.Unavailable), "%v", err)
}

func queue(t *testing.T, tx db.Tx, sql string, args ...any) {
	t.Helper()
	require.NoError(t, tx.Queue(t.Context(), sql, args...))
}

func TestWhatWaitsGoesOutBeforeTheNextStatementAndWithTheCommit(t *testing.T) {
	onBothEngines(t, func(t *testing.T, d *db.DB) {
		do(t, d, `CREATE TABLE rows (id INT8 PRIMARY KEY)`)
		_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (none, error) {
			err := tx.QueryRow(t.Context(), `SELECT id FROM rows WHERE id = $1`, 1).Scan(new(int))
			require.True(t, db.IsNoRows(err), "what a first statement does not find ends nothing: %v", err)
			for id := range 3 {
				queue(t, tx, `INSERT INTO rows VALUES ($1)`, id)
			}
			var n int
			require.NoError(t, tx.QueryRow(t.Context(), `SELECT count(*) FROM rows`).Scan(&n))
			require.Equal(t, 3, n)
			queue(t, tx, `INSERT INTO rows VALUES ($1)`, 3)
			rows, err := tx.Query(t.Context(), `SELECT id FROM rows ORDER BY id`)
			require.NoError(t, err)
			all, err := pgx.CollectRows(rows, pgx.RowTo[int])
			require.NoError(t, err)
			require.Equal(t, []int{0, 1, 2, 3}, all)
			queue(t, tx, `INSERT INTO rows VALUES ($1)`, 4)
			tag, err := tx.Exec(t.Context(), `UPDATE rows SET id = id + 10`)
			require.NoError(t, err)
			require.EqualValues(t, 5, tag.RowsAffected())
			for id := range 200 {
				queue(t, tx, `INSERT INTO rows VALUES ($1)`, 20+id)
			}
			return none{}, nil
		})
		require.NoError(t, err)
		require.Equal(t, 205, number(t, d, `SELECT count(*) FROM rows`))
	})
}

func TestFailureOfWhatWaitedFailsTheTransaction(t *testing.T) {
	onBothEngines(t, func(t *testing.T, d *db.DB) {
		do(t, d, `CREATE TABLE rows (id INT8 PRIMARY KEY)`)
		do(t, d, `INSERT INTO rows VALUES (1)`)
		for _, wrong := range []string{`INSERT INTO rows VALUES (1)`, `INSERT INTO absent VALUES (1)`} {
			_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (none, error) {
				queue(t, tx, `INSERT INTO rows VALUES (2)`)
				queue(t, tx, wrong)
				return none{}, nil
			})
			require.ErrorContains(t, err, "that waited")
			// Nor does anything happen after it, even where the caller hides it: without its BEGIN a statement would be a
			// transaction of its own.
			_, err = db.RunTx(t.Context(), d, func(tx db.Tx) (none, error) {
				queue(t, tx, wrong)
				_ = tx.QueryRow(t.Context(), `SELECT 1`).Scan(new(int))
				_, _ = tx.Exec(t.Context(), `INSERT INTO rows VALUES (3)`)
				require.Error(t, tx.Queue(t.Context(), `INSERT INTO rows VALUES (5)`))
				_ = tx.QueryRow(t.Context(), `INSERT INTO rows VALUES (4) RETURNING id`).Scan(new(int))
				return none{}, nil
			})
			require.ErrorContains(t, err, "that waited")
		}
		require.Equal(t, 1, number(t, d, `SELECT count(*) FROM rows`))
	})
}

func TestConflictInWhatWaitedIsTriedAgain(t *testing.T) {
	d := dbtest.New(t)
	do(t, d, `CREATE TABLE counters (id INT8 PRIMARY KEY, n INT8 NOT NULL)`)
	do(t, d, `INSERT INTO counters VALUES (1, 0)`)
	attempts := 0
	_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (none, error) {
		attempts++
		var n int
		require.NoError(t, tx.QueryRow(t.Context(), `SELECT n FROM counters WHERE id = 1`).Scan(&n))
		if attempts == 1 {
			do(t, d, `UPDATE counters SET n = n + 1 WHERE id = 1`)
		}
		queue(t, tx, `UPDATE counters SET n = $1 WHERE id = 1`, n+1)
		return none{}, nil
	})
	require.NoError(t, err)
	require.Equal(t, 2, attempts)
	require.Equal(t, 2, number(t, d, `SELECT n FROM counters`))
}

func TestACommitEnqueuesWhatTheTransactionNamedAndARollbackNothing(t *testing.T) {
	d := dbtest.New(t)
	var first, second []string
	d.OnCommit("q", func(item string) { first = append(first, item) })
	d.OnCommit("q", func(item string) { second = append(second, item) })
	refused := errors.New("refused")
	for _, outcome := range []error{refused, nil} {
		_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (struct{}, error) {
			_, err := tx.Exec(t.Context(), `SELECT 1`)
			require.NoError(t, err)
			tx.Enqueue("q", "a", "b")
			tx.Enqueue("other", "c")
			require.Empty(t, first, "nothing follows before the commit")
			return struct{}{}, outcome
		})
		require.ErrorIs(t, err, outcome)
	}
	require.Equal(t, []string{"a", "b"}, first)
	require.Equal(t, first, second)
}
