package db

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// Select returns the rows of a query, each read by scan (pgx.RowTo, pgx.RowToStructByPos).
func Select[T any](ctx context.Context, tx Tx, scan pgx.RowToFunc[T], sql string, args ...any) ([]T, error) {
	rows, err := tx.Query(ctx, sql, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scan)
}

// SelectOne returns the only row of a query; IsNoRows tells the error where there is none.
func SelectOne[T any](ctx context.Context, tx Tx, scan pgx.RowToFunc[T], sql string, args ...any) (one T, err error) {
	rows, err := tx.Query(ctx, sql, args...)
	if err != nil {
		return one, err
	}
	return pgx.CollectExactlyOneRow(rows, scan)
}

// Value returns the only column of the only row of a query.
func Value[T any](ctx context.Context, tx Tx, sql string, args ...any) (T, error) {
	return SelectOne(ctx, tx, pgx.RowTo[T], sql, args...)
}

// ForEach scans each row of a query into scans and then calls fn.
func ForEach(ctx context.Context, tx Tx, scans []any, fn func(), sql string, args ...any) error {
	rows, err := tx.Query(ctx, sql, args...)
	if err != nil {
		return err
	}
	_, err = pgx.ForEachRow(rows, scans, func() error {
		fn()
		return nil
	})
	return err
}

// CollectMap collects rows of two columns, key and value, into a map. It takes what Query returns.
func CollectMap[K comparable, V any](rows pgx.Rows, err error) (map[K]V, error) {
	if err != nil {
		return nil, err
	}
	out := map[K]V{}
	var (
		key   K
		value V
	)
	_, err = pgx.ForEachRow(rows, []any{&key, &value}, func() error {
		out[key] = value
		return nil
	})
	return out, err
}

// CollectColumn collects rows of one column. It takes what Query returns.
func CollectColumn[T any](rows pgx.Rows, err error) ([]T, error) {
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[T])
}

// OrNull is NULL for the zero value.
func OrNull[T comparable](value T) *T {
	if value == *new(T) {
		return nil
	}
	return &value
}

// Page is a piece of a listing.
type Page struct {
	// After is the cursor of the last item already seen, mostly its id; empty starts at the first.
	After string
	// Limit is how many items to return. A caller who asks for one more than it shows learns whether there is a next.
	Limit int
}
