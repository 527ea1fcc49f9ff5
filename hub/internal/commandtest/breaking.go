package commandtest

import (
	"context"
	"errors"
	"io"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// ErrInjected is what a BreakingTx fails with.
var ErrInjected = errors.New("injected")

// BreakingTx fails its nth statement; 0 lets all pass. It counts them.
type BreakingTx struct {
	db.Tx
	N, Seen int
}

func (b *BreakingTx) hit() bool {
	b.Seen++
	return b.Seen == b.N
}

// Exec implements db.Tx.
func (b *BreakingTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if b.hit() {
		return pgconn.CommandTag{}, ErrInjected
	}
	return b.Tx.Exec(ctx, sql, args...)
}

// Queue implements db.Tx.
func (b *BreakingTx) Queue(ctx context.Context, sql string, args ...any) error {
	if b.hit() {
		return ErrInjected
	}
	return b.Tx.Queue(ctx, sql, args...)
}

// Query implements db.Tx.
func (b *BreakingTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if b.hit() {
		return nil, ErrInjected
	}
	return b.Tx.Query(ctx, sql, args...)
}

// QueryRow implements db.Tx.
func (b *BreakingTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if b.hit() {
		return brokenRow{}
	}
	return b.Tx.QueryRow(ctx, sql, args...)
}

// QueryAll implements db.Tx.
func (b *BreakingTx) QueryAll(ctx context.Context, list []db.Statement,
	each func(n int, rows pgx.Rows, err error),
) {
	for n, s := range list {
		rows, err := b.Query(ctx, s.SQL, s.Args...)
		each(n, rows, err)
		if err == nil {
			rows.Close()
		}
	}
}

// CopyIn implements db.Tx.
func (b *BreakingTx) CopyIn(ctx context.Context, sql string, rows io.Reader) (pgconn.CommandTag, error) {
	if b.hit() {
		return pgconn.CommandTag{}, ErrInjected
	}
	return b.Tx.CopyIn(ctx, sql, rows)
}

type brokenRow struct{}

func (brokenRow) Scan(...any) error { return ErrInjected }

// Around is what runs a transaction's body; command.Service has a hook of this form for tests.
type Around func(tx db.Tx, body func(db.Tx) error) error

// RequireAtomic breaks every statement of a change, one at a time: nothing at all must be left of it, and no error may
// be swallowed on the way. Unbroken, it changes the tables.
func (w *World) RequireAtomic(change func(Around) error, tables ...string) {
	w.T.Helper()
	before := w.Contents()
	statements := w.brokenAt(0, change, false)
	require.Equal(w.T, before, w.Contents(), "counting rolls back")
	for n := 1; n <= statements; n++ {
		w.brokenAt(n, change, false)
	}
	require.Equal(w.T, before, w.Contents(), "nothing is left of %d broken attempts", statements)
	w.brokenAt(0, change, true)
	after := w.Contents()
	for _, table := range tables {
		require.NotEqual(w.T, before[table], after[table], table)
	}
}

// brokenAt runs a change with its nth statement failing and checks that the failure came out; with n = 0 nothing fails,
// and keep says whether to commit. It returns how many statements there were.
func (w *World) brokenAt(n int, change func(Around) error, keep bool) int {
	w.T.Helper()
	rolledBack := errors.New("rolled back")
	statements := 0
	err := change(func(tx db.Tx, body func(db.Tx) error) error {
		b := &BreakingTx{Tx: tx, N: n}
		err := body(b)
		statements = b.Seen
		if err == nil && !keep && n == 0 {
			err = rolledBack
		}
		return err
	})
	switch {
	case n > 0:
		require.ErrorIs(w.T, err, ErrInjected, "statement %d", n)
	case keep:
		require.NoError(w.T, err)
	default:
		require.ErrorIs(w.T, err, rolledBack)
	}
	return statements
}

// InTx is a change that is made in a transaction of its own.
func (w *World) InTx(fn func(ctx context.Context, tx db.Tx) error) func(Around) error {
	return func(around Around) error {
		err := db.WriteTx(w.T.Context(), w.DB, func(tx db.Tx) error {
			return around(tx, func(tx db.Tx) error { return fn(w.T.Context(), tx) })
		})
		return err
	}
}
