package db

import (
	"context"
	"encoding/binary"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// Old is a batch of a table's rows that a periodic deletion takes: at most Limit rows from After on, none younger than
// Before. After is where the batch before it ended, in the order that an index gives; its zero value is the table's
// beginning.
type Old[K any] struct {
	After  K
	Before time.Time
	Limit  int
}

// FirstID returns the lowest id that NewID can make at t: rows that were made before t have lower ones.
func FirstID(t time.Time) string {
	id := uuid.UUID{8: 0x80}
	binary.BigEndian.PutUint64(id[:], uint64(max(t.UnixMilli(), 0))<<16|0x7000)
	return id.String()
}

// DeleteOld deletes the rows whose ids query returns, and returns the last id and how many there were. query gets the
// first id of the batch as $1, the lowest id that is too young as $2, its time as $3 and the limit as $4; statement
// gets the ids as $1. They are two because a DELETE over a subquery may be planned as a scan of the whole table.
func DeleteOld(ctx context.Context, tx Tx, o Old[string], query, statement string) (last string, n int, err error) {
	after := o.After
	if after == "" {
		after = uuid.Nil.String()
	}
	ids, err := Select(ctx, tx, pgx.RowTo[pgtype.UUID], query, after, FirstID(o.Before), o.Before, o.Limit)
	if err != nil || len(ids) == 0 {
		return "", 0, err
	}
	return ids[len(ids)-1].String(), len(ids), tx.Queue(ctx, statement, ids)
}
