package db

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	// leaseDuration is how long a hub process that was killed keeps another one out, leaseHeartbeat how often one that
	// lives says so.
	leaseDuration  = 20 * time.Second
	leaseHeartbeat = 5 * time.Second
	// leaseEndTimeout bounds how long a hub that stops tries to end its lease.
	leaseEndTimeout = 5 * time.Second
)

// Process is a hub process that wants to work on a database.
type Process struct {
	// ID is random for each process.
	ID string
	// Owner names what the process has locked and no other process can have: a successor with the same owner need not
	// wait.
	Owner string
	Host  string
	PID   int
}

// Lease says that one hub process works on a database: what hubs keep in memory about nodes and requests is not shared.
// The database's clock counts, so that the clocks of two machines need not agree.
type Lease struct {
	db *DB
	me Process
}

// TakeLease takes the lease of the database, or says which process has it. It migrates the database first where that
// has no such table.
func TakeLease(ctx context.Context, d *DB, me Process) (*Lease, error) {
	err := takeLease(ctx, d, me)
	if sqlState(err) == "42P01" {
		if err = Migrate(ctx, d); err == nil {
			err = takeLease(ctx, d, me)
		}
	}
	if err != nil {
		return nil, err
	}
	return &Lease{db: d, me: me}, nil
}

func takeLease(ctx context.Context, d *DB, me Process) error {
	return WriteTx(ctx, d, func(tx Tx) error {
		var (
			other             Process
			since             time.Time
			silent, remaining float64
		)
		err := tx.QueryRow(ctx,
			`SELECT holder, owner, host, pid, since, extract(epoch FROM now() - heartbeat_at)::FLOAT8, extract(epoch
				FROM expires_at - now())::FLOAT8
			FROM hub_lease WHERE name = 'hub' FOR UPDATE`).Scan(&other.ID, &other.Owner, &other.Host, &other.PID, &since,
			&silent, &remaining)
		switch {
		case IsNoRows(err):
		case err != nil:
			return err
		case remaining > 0 && other.Owner != me.Owner:
			return leaseHeld(other, since, silent, remaining)
		}
		return tx.Queue(ctx, `INSERT INTO hub_lease (name, holder, owner, host, pid, since, heartbeat_at, expires_at)
			VALUES ('hub', $1, $2, $3, $4, now(), now(), now() + $5::INT8 * INTERVAL '1 millisecond')
			ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, owner = excluded.owner, host = excluded.host, pid =
			excluded.pid,
				since = excluded.since, heartbeat_at = excluded.heartbeat_at, expires_at = excluded.expires_at`,
			me.ID, me.Owner, me.Host, me.PID, leaseDuration.Milliseconds())
	})
}

func leaseHeld(other Process, since time.Time, silent, remaining float64) error {
	return fault.New(fault.Conflict, CodeLeaseHeld, fmt.Sprintf(
		"Another gpuaas-hub works on this database: process %d on %s, since %s, last seen %.0f s ago. Stop it first. If it "+
			"is gone, this one can start in %.0f s.",
		other.PID, other.Host, since.UTC().Format(time.RFC3339), silent, remaining), nil)
}

// Keep renews the lease until ctx ends. It returns an error when another process has taken it: this one must stop.
func (l *Lease) Keep(ctx context.Context, log *slog.Logger) error {
	tick := time.NewTicker(leaseHeartbeat)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		kept, err := l.Renew(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			// A process that cannot reach the database cannot change it either.
			log.WarnContext(ctx, "lease of the database not renewed", slog.Any("error", err))
		case !kept:
			return fault.New(fault.Conflict, CodeLeaseHeld, "Another gpuaas-hub has taken over this database; this one stops.",
				nil)
		}
	}
}

// Renew prolongs the lease; kept is false when another process has taken it.
func (l *Lease) Renew(ctx context.Context) (kept bool, err error) {
	return RunTx(ctx, l.db, func(tx Tx) (bool, error) {
		tag, err := tx.Exec(ctx,
			`UPDATE hub_lease SET heartbeat_at = now(), expires_at = now() + $2::INT8 * INTERVAL '1 millisecond'
				WHERE name = 'hub' AND holder = $1`,
			l.me.ID, leaseDuration.Milliseconds())
		return tag.RowsAffected() == 1, err
	})
}

// End lets another process start at once.
func (l *Lease) End(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaseEndTimeout)
	defer cancel()
	err := WriteTx(ctx, l.db, func(tx Tx) error {
		return tx.Queue(ctx, `UPDATE hub_lease SET expires_at = now() WHERE name = 'hub' AND holder = $1`, l.me.ID)
	})
	if fault.Is(err, fault.Unavailable) || errors.Is(err, context.DeadlineExceeded) {
		return nil // the lease ends by itself
	}
	return err
}

// ForgetLease ends whatever lease was copied with the rows of another database, in the caller's transaction.
func ForgetLease(ctx context.Context, tx Tx) error {
	return tx.Queue(ctx, `DELETE FROM hub_lease`)
}
