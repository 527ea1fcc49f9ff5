package db

import "github.com/jackc/pgx/v5"

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
