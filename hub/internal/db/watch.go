package db

import (
	"context"
	"errors"
	"io"
	"net"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// watchedTx remembers that the database asked for a fresh start, whatever the caller makes of the error.
type watchedTx struct {
	tx       pgx.Tx
	conflict error
}

func (w *watchedTx) note(err error) error {
	if err != nil && w.conflict == nil && isConflict(err) {
		w.conflict = err
	}
	return err
}

func (w *watchedTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	tag, err := w.tx.Exec(ctx, sql, args...)
	return tag, w.note(err)
}

func (w *watchedTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	rows, err := w.tx.Query(ctx, sql, args...)
	if rows == nil {
		return nil, w.note(err)
	}
	return watchedRows{rows, w}, w.note(err)
}

func (w *watchedTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return watchedRow{w.tx.QueryRow(ctx, sql, args...), w}
}

func (w *watchedTx) CopyIn(ctx context.Context, sql string, rows io.Reader) (pgconn.CommandTag, error) {
	tag, err := w.tx.Conn().PgConn().CopyFrom(ctx, rows, sql)
	return tag, w.note(err)
}

type watchedRow struct {
	row pgx.Row
	w   *watchedTx
}

func (r watchedRow) Scan(dest ...any) error { return r.w.note(r.row.Scan(dest...)) }

type watchedRows struct {
	pgx.Rows
	w *watchedTx
}

func (r watchedRows) Err() error             { return r.w.note(r.Rows.Err()) }
func (r watchedRows) Scan(dest ...any) error { return r.w.note(r.Rows.Scan(dest...)) }
func (r watchedRows) Next() bool {
	ok := r.Rows.Next()
	if !ok {
		_ = r.w.note(r.Rows.Err())
	}
	return ok
}

// errLookWrites is a mistake of ours: what is written needs a transaction.
var errLookWrites = errors.New("db: Look does not write")

// looking sends each statement by itself.
type looking struct{ pool *pgxpool.Pool }

func (looking) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, errLookWrites
}

func (looking) CopyIn(context.Context, string, io.Reader) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, errLookWrites
}

func (l looking) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return l.pool.Query(ctx, sql, args...)
}

func (l looking) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return l.pool.QueryRow(ctx, sql, args...)
}

func errIsNetwork(err error) bool {
	_, connect := errors.AsType[*pgconn.ConnectError](err)
	_, network := errors.AsType[net.Error](err)
	return connect || network || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed)
}
