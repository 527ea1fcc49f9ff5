package db

import (
	"context"
	"errors"
	"io"
	"iter"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Statement is one of those that QueryAll sends.
type Statement struct {
	SQL  string
	Args []any
}

// Together runs functions that do not depend on each other, and returns the first error in their order. They take
// turns: each runs until its next statement, and then the waiting statements of all go out in one round trip. No two of
// them run at the same time. None may read what another writes, and none may use CopyIn.
func Together(ctx context.Context, tx Tx, parts ...func(tx Tx) error) error {
	errs := make([]error, len(parts))
	next := make([]func() (*statements, bool), len(parts))
	waiting := make([]*statements, len(parts))
	for i, part := range parts {
		var stop func()
		next[i], stop = iter.Pull(func(yield func(*statements) bool) { errs[i] = part(partTx{tx, yield}) })
		defer stop()
		waiting[i], _ = next[i]()
	}
	for {
		var (
			all []Statement
			// of has for each of all the part that it is of, and which of its statements it is.
			of []struct{ part, n int }
		)
		for i, w := range waiting {
			for n := range w.len() {
				all, of = append(all, w.list[n]), append(of, struct{ part, n int }{i, n})
			}
		}
		if len(all) == 0 {
			break
		}
		deliver := func(k int, rows pgx.Rows, err error) {
			i, n := of[k].part, of[k].n
			w := waiting[i]
			w.each(n, rows, err)
			if n == w.len()-1 {
				waiting[i], _ = next[i]()
			}
		}
		if len(all) > 1 {
			tx.QueryAll(ctx, all, deliver)
			continue
		}
		rows, err := tx.Query(ctx, all[0].SQL, all[0].Args...)
		deliver(0, rows, err)
		if err == nil {
			rows.Close()
		}
	}
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// statements wait for the next round trip; each gets the rows of one.
type statements struct {
	list []Statement
	each func(n int, rows pgx.Rows, err error)
}

func (s *statements) len() int {
	if s == nil {
		return 0
	}
	return len(s.list)
}

// partTx is the transaction of a part; send returns when the rows are there.
type partTx struct {
	Tx
	send func(*statements) bool
}

var (
	errPartEnded = errors.New("db: the other parts have ended with a panic")
	errPartCopy  = errors.New("db: a part of Together does not copy")
)

// QueryAll implements Tx.
func (p partTx) QueryAll(_ context.Context, list []Statement, each func(n int, rows pgx.Rows, err error)) {
	if len(list) > 0 && !p.send(&statements{list, each}) {
		each(0, nil, errPartEnded)
	}
}

// Query implements Tx.
func (p partTx) Query(ctx context.Context, sql string, args ...any) (rows pgx.Rows, err error) {
	p.QueryAll(ctx, []Statement{{sql, args}}, func(_ int, r pgx.Rows, e error) { rows, err = r, e })
	return rows, err
}

// QueryRow implements Tx.
func (p partTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	rows, err := p.Query(ctx, sql, args...)
	return firstRow{rows, err}
}

// Exec implements Tx.
func (p partTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	rows, err := p.Query(ctx, sql, args...)
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	rows.Close()
	return rows.CommandTag(), rows.Err()
}

// CopyIn implements Tx.
func (partTx) CopyIn(context.Context, string, io.Reader) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, errPartCopy
}

// firstRow is the first of rows, as pgx.Conn's QueryRow reads it.
type firstRow struct {
	rows pgx.Rows
	err  error
}

func (r firstRow) Scan(dest ...any) error {
	if r.err != nil {
		return r.err
	}
	defer r.rows.Close()
	if !r.rows.Next() {
		if err := r.rows.Err(); err != nil {
			return err
		}
		return pgx.ErrNoRows
	}
	if err := r.rows.Scan(dest...); err != nil {
		return err
	}
	r.rows.Close()
	return r.rows.Err()
}
