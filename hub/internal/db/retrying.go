package db

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// querier is a connection, or a transaction that a library has opened on it.
type querier interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

// retryingTx sends statements, queued ones with the next, and remembers a serialization failure even where the caller
// turns it into another error.
type retryingTx struct {
	on   querier
	conn *pgx.Conn
	// queued statements go out with the next statement; nil where there are none.
	queued   *pgx.Batch
	conflict error
	// changed are the resources that Changed named.
	changed []string
	// enqueued are the items that Enqueue named, by queue.
	enqueued map[string][]string
	// wrote are the indexes of the watches in writes of the tables that were written.
	wrote  []int
	writes *tableWatches
	// dead is set once a batch has failed: what of it was sent, and with it whether there is a transaction, is not known
	// any more.
	dead error
}

func (w *retryingTx) note(err error) error {
	if err != nil && w.conflict == nil && isConflict(err) {
		w.conflict = err
	}
	return err
}

// Queue implements Tx.
func (w *retryingTx) Queue(ctx context.Context, sql string, args ...any) error {
	if w.dead != nil {
		return w.dead
	}
	if w.queued == nil {
		w.queued = &pgx.Batch{}
	}
	if w.queued.Len() >= maxQueuedStatements {
		_, err := w.Exec(ctx, sql, args...)
		return err
	}
	w.sends(sql)
	w.queued.Queue(sql, args...)
	return nil
}

// flush sends what waits, and statements of which the caller reads the results.
func (w *retryingTx) flush(ctx context.Context, list ...Statement) (pgx.BatchResults, error) {
	if w.dead != nil {
		return nil, w.dead
	}
	batch := cmp.Or(w.queued, &pgx.Batch{})
	w.queued = nil
	waited := batch.Len()
	for _, s := range list {
		w.sends(s.SQL)
		batch.Queue(s.SQL, s.Args...)
	}
	results := w.on.SendBatch(ctx, batch)
	for n := range waited {
		if _, err := results.Exec(); err != nil {
			_ = results.Close()
			w.dead = w.note(fmt.Errorf("statement %d of %d that waited: %w", n+1, waited, err))
			return nil, w.dead
		}
	}
	return results, nil
}

// ended closes a batch of which the last result was read with this error.
func (w *retryingTx) ended(results pgx.BatchResults, err error) error {
	if end := results.Close(); end != nil {
		w.dead = w.note(end)
		err = cmp.Or(err, end)
	}
	return w.note(err)
}

func (w *retryingTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if w.queued == nil && w.dead == nil {
		w.sends(sql)
		tag, err := w.on.Exec(ctx, sql, args...)
		return tag, w.note(err)
	}
	results, err := w.flush(ctx, Statement{sql, args})
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	tag, err := results.Exec()
	return tag, w.ended(results, err)
}

func (w *retryingTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if w.queued == nil && w.dead == nil {
		w.sends(sql)
		rows, err := w.on.Query(ctx, sql, args...)
		if rows == nil {
			return nil, w.note(err)
		}
		return &watchedRows{Rows: rows, w: w}, w.note(err)
	}
	results, err := w.flush(ctx, Statement{sql, args})
	if err != nil {
		return nil, err
	}
	rows, err := results.Query()
	if err != nil {
		return nil, w.ended(results, err)
	}
	return &watchedRows{Rows: rows, w: w, results: results}, nil
}

func (w *retryingTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if w.queued == nil && w.dead == nil {
		w.sends(sql)
		return watchedRow{row: w.on.QueryRow(ctx, sql, args...), w: w}
	}
	results, err := w.flush(ctx, Statement{sql, args})
	if err != nil {
		return watchedRow{err: err, w: w}
	}
	return watchedRow{row: results.QueryRow(), w: w, results: results}
}

// QueryAll implements Tx.
func (w *retryingTx) QueryAll(ctx context.Context, list []Statement, each func(n int, rows pgx.Rows, err error)) {
	results, failed := w.flush(ctx, list...)
	for n := range list {
		if failed != nil {
			each(n, nil, failed)
			continue
		}
		rows, err := results.Query()
		if err != nil {
			each(n, nil, w.note(err))
			continue
		}
		each(n, &watchedRows{Rows: rows, w: w}, nil)
		rows.Close()
	}
	if failed == nil {
		_ = w.ended(results, nil)
	}
}

func (w *retryingTx) CopyIn(ctx context.Context, sql string, rows io.Reader) (pgconn.CommandTag, error) {
	if err := w.flushed(ctx); err != nil {
		return pgconn.CommandTag{}, err
	}
	w.sends(sql)
	tag, err := w.conn.PgConn().CopyFrom(ctx, rows, sql)
	return tag, w.note(err)
}

// flushed sends what waits by itself.
func (w *retryingTx) flushed(ctx context.Context) error {
	if w.queued == nil {
		return w.dead
	}
	_, err := w.Exec(ctx, `SELECT 1`)
	return err
}

// watchedRow is one row; results, where it is not nil, is the batch that it came in.
type watchedRow struct {
	row     pgx.Row
	err     error
	w       *retryingTx
	results pgx.BatchResults
}

func (r watchedRow) Scan(dest ...any) error {
	if r.err != nil {
		return r.err
	}
	err := r.row.Scan(dest...)
	if r.results != nil {
		return r.w.ended(r.results, err)
	}
	return r.w.note(err)
}

type watchedRows struct {
	pgx.Rows
	w *retryingTx
	// results is the batch that the rows came in; nil where that is over, or was none.
	results pgx.BatchResults
	err     error
}

func (r *watchedRows) Close() {
	r.Rows.Close()
	if r.results != nil {
		r.err = r.w.ended(r.results, r.Rows.Err())
		r.results = nil
	}
}

func (r *watchedRows) Err() error {
	if r.err != nil {
		return r.err
	}
	return r.w.note(r.Rows.Err())
}

func (r *watchedRows) Scan(dest ...any) error { return r.w.note(r.Rows.Scan(dest...)) }

func (r *watchedRows) Next() bool {
	ok := r.Rows.Next()
	if !ok {
		r.Close()
		_ = r.w.note(r.Rows.Err())
	}
	return ok
}

// errQueryOnly is a programming error: a write needs a transaction.
var errQueryOnly = errors.New("db: Query does not write")

// queryOnly sends each statement by itself, outside a transaction.
type queryOnly struct{ pool *pgxpool.Pool }

func (queryOnly) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, errQueryOnly
}

func (queryOnly) Queue(context.Context, string, ...any) error { return errQueryOnly }

func (queryOnly) CopyIn(context.Context, string, io.Reader) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, errQueryOnly
}

func (l queryOnly) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return l.pool.Query(ctx, sql, args...)
}

func (l queryOnly) QueryAll(ctx context.Context, list []Statement, each func(n int, rows pgx.Rows, err error)) {
	batch := &pgx.Batch{}
	for _, s := range list {
		batch.Queue(s.SQL, s.Args...)
	}
	results := l.pool.SendBatch(ctx, batch)
	defer func() { _ = results.Close() }()
	for n := range list {
		rows, err := results.Query()
		if err != nil {
			each(n, nil, err)
			continue
		}
		each(n, rows, nil)
		rows.Close()
	}
}

func (l queryOnly) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return l.pool.QueryRow(ctx, sql, args...)
}

func errIsNetwork(err error) bool {
	_, connect := errors.AsType[*pgconn.ConnectError](err)
	_, network := errors.AsType[net.Error](err)
	return connect || network || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, net.ErrClosed) || errors.Is(err, pgconn.ErrConnClosed)
}
