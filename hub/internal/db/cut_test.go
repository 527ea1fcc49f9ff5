package db_test

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest/wire"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// through opens a database of the test's own through a proxy.
func through(t *testing.T, options ...wire.Option) (*db.DB, *wire.Proxy) {
	t.Helper()
	return wire.Open(t, dbtest.PrivateURL(t), options...)
}

// write is RunTx or LockTx.
type write func(ctx context.Context, d *db.DB, fn func(tx db.Tx) (none, error)) (none, error)

func writes() map[string]write {
	return map[string]write{"serializable": db.RunTx[none], "locking": db.LockTx[none]}
}

// inserts are the ways in which a transaction's last statement reaches the server: by itself, or with COMMIT.
func inserts() map[string]func(ctx context.Context, tx db.Tx) error {
	return map[string]func(ctx context.Context, tx db.Tx) error{
		"COMMIT by itself": func(ctx context.Context, tx db.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO rows VALUES ($1)`, db.NewID())
			return err
		},
		"COMMIT in a batch": func(ctx context.Context, tx db.Tx) error {
			return tx.Queue(ctx, `INSERT INTO rows VALUES ($1)`, db.NewID())
		},
	}
}

// A connection that ends in COMMIT leaves an outcome that the hub cannot know, and that it does not try again: half of
// these transactions have happened.
func TestAConnectionThatEndsInCommitIsAmbiguousWhicheverSideOfItWasReached(t *testing.T) {
	for name, c := range map[string]struct {
		cut  func(*wire.Proxy)
		rows int
	}{
		"before the server":          {func(p *wire.Proxy) { p.CutBefore("COMMIT") }, 0},
		"after the server committed": {(*wire.Proxy).CutAfterCommit, 1},
	} {
		for kind, run := range writes() {
			for form, insert := range inserts() {
				t.Run(strings.Join([]string{name, kind, form}, "/"), func(t *testing.T) {
					d, p := through(t)
					do(t, d, `CREATE TABLE rows (id UUID PRIMARY KEY)`)
					signals := 0
					d.OnCommit("q", func(string) { signals++ })
					c.cut(p)
					attempts := 0
					_, err := run(t.Context(), d, func(tx db.Tx) (none, error) {
						attempts++
						tx.Enqueue("q", "item")
						return none{}, insert(t.Context(), tx)
					})
					require.ErrorIs(t, err, db.ErrAmbiguousCommit)
					require.EqualValues(t, "commit_ambiguous", fault.As(err).Code)
					require.True(t, fault.Is(err, fault.Unavailable))
					require.Contains(t, fault.As(err).Public, "X-Idempotency-Key")
					require.Zero(t, p.Pending(), "the connection was cut")
					require.Equal(t, 1, attempts)
					require.Equal(t, 1, signals, "who waits for a change reads whether there is one")
					require.Equal(t, c.rows, number(t, d, `SELECT count(*) FROM rows`))
					_, err = run(t.Context(), d, func(tx db.Tx) (none, error) { return none{}, insert(t.Context(), tx) })
					require.NoError(t, err, "the hub goes on")
				})
			}
		}
	}
}

// What ends before COMMIT was not done, and is done again.
func TestAConnectionThatEndsBeforeCommitIsTriedAgain(t *testing.T) {
	for _, at := range []string{"BEGIN", "INSERT"} {
		for form, insert := range inserts() {
			if at == "INSERT" && form == "COMMIT in a batch" {
				continue // the batch holds COMMIT: whether the server had it, nobody knows
			}
			t.Run(at+"/"+form, func(t *testing.T) {
				d, p := through(t)
				do(t, d, `CREATE TABLE rows (id UUID PRIMARY KEY)`)
				p.CutBefore(at)
				attempts := 0
				_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (none, error) {
					attempts++
					if _, err := tx.Exec(t.Context(), `SELECT 1`); err != nil {
						return none{}, err
					}
					return none{}, insert(t.Context(), tx)
				})
				require.NoError(t, err)
				require.Zero(t, p.Pending())
				require.Equal(t, 2, attempts)
				require.Equal(t, 1, number(t, d, `SELECT count(*) FROM rows`))
			})
		}
	}
}

// A read has no outcome that could be in doubt.
func TestAReadWhoseCommitIsCutIsReadAgain(t *testing.T) {
	d, p := through(t)
	p.CutBefore("COMMIT")
	p.CutAfterCommit()
	require.Equal(t, 1, number(t, d, `SELECT 1`))
	require.Zero(t, p.Pending())
}

// A pooler that gives each transaction another connection loses what the hub has set for one.
func TestAPoolerThatDropsSettingsIsRefused(t *testing.T) {
	direct := dbtest.PrivateURL(t)
	administer(t, direct, `DO $$BEGIN EXECUTE format('ALTER DATABASE %I SET synchronous_commit = off', current_database());
		END$$`)
	p := wire.New(t, direct, wire.Rewrite(func(sql string) string {
		return strings.ReplaceAll(sql, "set_config('synchronous_commit', ", "concat('', ")
	}))
	url, err := p.URL(direct)
	require.NoError(t, err)
	_, err = db.Open(t.Context(), url)
	require.EqualValues(t, "database_not_durable", fault.As(err).Code)
	require.Contains(t, fault.As(err).Public, "synchronous_commit is off")
	require.Contains(t, fault.As(err).Public, "ALTER ROLE")
	administer(t, direct, `DO $$BEGIN EXECUTE format('ALTER DATABASE %I SET synchronous_commit = on', current_database());
		END$$`)
	d, err := db.Open(t.Context(), url)
	require.NoError(t, err, "the remedy that the message names, for the database")
	d.Close()
}
