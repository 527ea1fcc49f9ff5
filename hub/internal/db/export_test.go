package db

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// BreakCommitOnce makes the database end the connection of the next transaction just before its COMMIT is sent.
func (d *DB) BreakCommitOnce(ctx context.Context) {
	d.beforeCommit = func(conn *pgx.Conn) {
		d.beforeCommit = nil
		_, _ = d.pool.Exec(ctx, `SELECT pg_terminate_backend($1)`, conn.PgConn().PID())
	}
}

// AfterSnapshotOnce runs fn when the next dump has its snapshot.
func (d *DB) AfterSnapshotOnce(fn func()) {
	d.afterSnapshot = func() {
		d.afterSnapshot = nil
		fn()
	}
}
