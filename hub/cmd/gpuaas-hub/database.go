package main

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/managed"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// What the commands share that work on a hub's data on its own machine, whether the hub runs or not.

// closers run in reverse order.
type closers []func() error

func (c *closers) add(fn func() error) { *c = append(*c, fn) }

func (c *closers) close() error {
	var all error
	for _, fn := range slices.Backward(*c) {
		all = errors.Join(all, fn())
	}
	return all
}

func (c *config) databaseFlags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&c.dataDir, "data-dir", defaultDataDir, "directory of the hub's data")
	cmd.Flags().StringVar(&c.databaseURLFile, "database-url-file", "", "file with the URL of the hub's database "+
		"(default: its private PostgreSQL)")
	cmd.Flags().StringVar(&c.postgresBinDir, "postgres-bin-dir", "", "directory with initdb and postgres (default: "+
		"found on the machine)")
}

// openLocalDatabase opens the hub's database: while the hub runs as a second client, otherwise as the hub would, with
// the data directory locked.
func openLocalDatabase(ctx context.Context, c config, onClose func(func() error)) (*db.DB, error) {
	lock, err := checkDataDir(c.dataDir)
	if err == nil {
		onClose(lock.Close)
		return openDatabase(ctx, c, slog.New(slog.DiscardHandler), onClose)
	}
	if fault.As(err).Code != fault.CodeDataDirInUse {
		return nil, err
	}
	url, err := c.databaseURL()
	if err != nil {
		return nil, err
	}
	if url == "" {
		running := false
		if url, running = managed.Running(filepath.Join(c.dataDir, "postgres")); !running {
			return nil, fault.New(fault.Unavailable, managed.CodeDatabaseNotReady, "The hub in "+c.dataDir+
				" is starting or stopping, and its database does not run; try again in a moment.", nil)
		}
	}
	d, err := db.Open(ctx, url)
	if err != nil {
		return nil, err
	}
	onClose(func() error { d.Close(); return nil })
	return d, nil
}

// openHubDatabase keeps other hub processes out before it migrates the schema.
func openHubDatabase(ctx context.Context, c config, process db.Process, log logger, opened *closers,
) (*db.DB, *db.Lease, error) {
	d, err := connectDatabase(ctx, c, log, opened.add)
	if err != nil {
		return nil, nil, err
	}
	lease, err := db.TakeLease(ctx, d, process)
	if err != nil {
		return nil, nil, err
	}
	opened.add(func() error { return lease.End(context.WithoutCancel(ctx)) })
	return d, lease, db.Migrate(ctx, d)
}

// openDatabase opens the operator's database, or a private one, and migrates its schema.
func openDatabase(ctx context.Context, c config, log logger, onClose func(func() error)) (*db.DB, error) {
	d, err := connectDatabase(ctx, c, log, onClose)
	if err != nil {
		return nil, err
	}
	return d, db.Migrate(ctx, d)
}

// connectDatabase opens the operator's database, or a private one, as it is.
func connectDatabase(ctx context.Context, c config, log logger, onClose func(func() error)) (*db.DB, error) {
	url, err := c.databaseURL()
	if err != nil {
		return nil, err
	}
	if url == "" {
		server, err := managed.Start(ctx, managed.Config{
			Dir: filepath.Join(c.dataDir, "postgres"), BinDir: c.postgresBinDir,
			Log: log,
		})
		if err != nil {
			return nil, err
		}
		onClose(server.Close)
		url = server.URL()
	}
	d, err := db.Open(ctx, url)
	if c.databaseURLFile != "" && fault.Is(err, fault.Unavailable) {
		err = fault.New(fault.Unavailable, db.CodeDatabaseUnavailable, "The database that "+c.databaseURLFile+
			" names does not answer: check that it runs, that this machine reaches it, and that the URL is right.", err)
	}
	if err != nil {
		return nil, err
	}
	onClose(func() error { d.Close(); return nil })
	return d, nil
}
