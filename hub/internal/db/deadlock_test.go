package db_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
)

// opposed changes two rows in its own order, and waits between them until the other transaction has changed its first.
type opposed struct {
	name          string
	first, second int
	// has is closed when the first row is changed, other when that of the other transaction is.
	has, other        chan struct{}
	attempts, victims int
}

func (o *opposed) run(ctx context.Context, tx db.Tx) error {
	o.attempts++
	tx.Enqueue("effects", o.name)
	change := func(id int) error {
		_, err := tx.Exec(ctx, `UPDATE counters SET n = n + 1 WHERE id = $1`, id)
		if e, is := errors.AsType[*pgconn.PgError](err); is && e.Code == "40P01" {
			o.victims++
		}
		return err
	}
	if _, err := tx.Exec(ctx, `INSERT INTO effects (name) VALUES ($1)`, o.name); err != nil {
		return err
	}
	if err := change(o.first); err != nil {
		return err
	}
	if o.attempts == 1 {
		close(o.has)
		<-o.other
	}
	return change(o.second)
}

// PostgreSQL ends one of two transactions that wait for each other (40P01). That one is repeated: no increment is lost,
// and the effects of its first attempt, rows and signals alike, are none.
func TestLaw08ADeadlockRepeatsOneTransactionAndLosesNothing(t *testing.T) {
	d := dbtest.New(t)
	do(t, d, `CREATE TABLE counters (id INT8 PRIMARY KEY, n INT8 NOT NULL)`)
	do(t, d, `CREATE TABLE effects (id INT8 GENERATED ALWAYS AS IDENTITY, name TEXT NOT NULL)`)
	do(t, d, `INSERT INTO counters VALUES (1, 0), (2, 0)`)
	var mu sync.Mutex
	signals := map[string]int{}
	d.OnCommit("effects", func(item string) {
		mu.Lock()
		defer mu.Unlock()
		signals[item]++
	})
	one, two := make(chan struct{}), make(chan struct{})
	a := &opposed{name: "a", first: 1, second: 2, has: one, other: two}
	b := &opposed{name: "b", first: 2, second: 1, has: two, other: one}
	errs := make([]error, 2)
	var both sync.WaitGroup
	for i, o := range []*opposed{a, b} {
		both.Go(func() {
			errs[i] = db.WriteTx(t.Context(), d, func(tx db.Tx) error { return o.run(t.Context(), tx) })
		})
	}
	both.Wait()
	require.NoError(t, errs[0])
	require.NoError(t, errs[1])
	require.Equal(t, 1, a.victims+b.victims, "the database has ended one of the two as a deadlock's victim")
	require.Positive(t, a.attempts+b.attempts-2, "which was repeated")
	for id := range 2 {
		require.Equal(t, 2, number(t, d, `SELECT n FROM counters WHERE id = $1`, id+1), "both increments of row %d", id+1)
	}
	for _, name := range []string{"a", "b"} {
		require.Equal(t, 1, number(t, d, `SELECT count(*) FROM effects WHERE name = $1`, name), name)
		require.Equal(t, 1, signals[name], "what follows a commit, once: %s", name)
	}
}
