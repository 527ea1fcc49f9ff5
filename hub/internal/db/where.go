package db

import (
	"slices"
	"strconv"
	"strings"
	"time"
)

// Where collects a query's arguments and those conditions that are asked for: with a condition that may be empty the
// database could not choose an index.
type Where struct {
	Args  []any
	parts []string
}

// Arg adds an argument and returns its placeholder.
func (w *Where) Arg(v any) string {
	w.Args = append(w.Args, v)
	return "$" + strconv.Itoa(len(w.Args))
}

// And adds a condition.
func (w *Where) And(condition string) { w.parts = append(w.parts, condition) }

// Compare adds left, a column and an operator, before value, unless value is empty.
func (w *Where) Compare(left, value string) {
	if value != "" {
		w.And(left + " " + w.Arg(value))
	}
}

// Between adds that column is in [from, to). A zero bound is none.
func (w *Where) Between(column string, from, to time.Time) {
	if !from.IsZero() {
		w.And(column + " >= " + w.Arg(from))
	}
	if !to.IsZero() {
		w.And(column + " < " + w.Arg(to))
	}
}

// SQL returns the WHERE clause, and also those conditions; it is empty where there are none.
func (w *Where) SQL(also ...string) string {
	if len(w.parts)+len(also) == 0 {
		return ""
	}
	return " WHERE " + strings.Join(slices.Concat(also, w.parts), " AND ")
}
