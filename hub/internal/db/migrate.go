package db

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

//go:embed migrations/*.sql
var migrations embed.FS

const (
	// Two hubs that start together take turns; a hub that died while it migrated blocks the others for the lease at most.
	migrationLease     = 30 * time.Second
	migrationHeartbeat = 5 * time.Second
	migrationLockPoll  = 200 * time.Millisecond
	// migrationLockTries × migrationLockPoll = five minutes of waiting for another hub's migrations.
	migrationLockTries = 1500
)

// Migrations is the embedded SQL, for tests that read it.
func Migrations() fs.FS {
	sub, err := fs.Sub(migrations, "migrations")
	if err != nil {
		panic(err) // the directory is compiled in
	}
	return sub
}

// Migrate updates the schema to what this program knows. It is safe when several hubs do it at once: the lock is a
// row with a lease, because session locks do not exist on CockroachDB. Migrations run outside transactions; each
// statement can run again, so that a file that was cut short is run from its start.
func Migrate(ctx context.Context, d *DB) error {
	return withProvider(d, func(p *goose.Provider) error {
		_, err := p.Up(ctx)
		return err
	})
}

// migrateTo applies just these migrations, in their order: the schema of an earlier release, for its backup.
func migrateTo(ctx context.Context, d *DB, versions []int64) error {
	return withProvider(d, func(p *goose.Provider) error {
		known := map[int64]bool{}
		for _, s := range p.ListSources() {
			known[s.Version] = true
		}
		for _, v := range versions {
			if !known[v] {
				return fault.New(fault.Unprocessable, CodeBackupOfNewerRelease, fmt.Sprintf("The backup was made by a newer "+
					"release: this one does not know migration %d. Restore it with that release.", v), nil)
			}
		}
		if len(versions) == len(known) {
			// The usual case, under one lock instead of one for each.
			_, err := p.Up(ctx)
			return err
		}
		for _, v := range versions {
			if _, err := p.ApplyVersion(ctx, v, true); err != nil {
				return err
			}
		}
		return nil
	})
}

func withProvider(d *DB, do func(*goose.Provider) error) error {
	quiet := slog.New(slog.DiscardHandler)
	locker, err := lock.NewPostgresTableLocker(
		lock.WithTableLeaseDuration(migrationLease),
		lock.WithTableHeartbeatInterval(migrationHeartbeat),
		lock.WithTableLockTimeout(migrationLockPoll, migrationLockTries),
		lock.WithTableLogger(quiet),
	)
	if err != nil {
		return fmt.Errorf("migration lock: %w", err)
	}
	sqlDB := stdlib.OpenDBFromPool(d.pool)
	defer func() { _ = sqlDB.Close() }() // closes the wrapper, not the pool
	provider, err := goose.NewProvider(goose.DialectPostgres, sqlDB, Migrations(),
		goose.WithLocker(locker),
		goose.WithSlog(quiet),
		goose.WithDisableGlobalRegistry(true),
	)
	if err != nil {
		return fmt.Errorf("read migrations: %w", err)
	}
	if err := do(provider); err != nil {
		var partial *goose.PartialError
		if errors.As(err, &partial) && partial.Failed != nil {
			return fmt.Errorf("migration %s: %w", partial.Failed.Source.Path, partial.Err)
		}
		return fmt.Errorf("migrate: %w", err)
	}
	return nil
}
