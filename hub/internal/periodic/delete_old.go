package periodic

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/backuprecord"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
	"github.com/gpuaas/gpuaas/hub/internal/webhook"
)

// Default retentions.
const (
	eventRetention      = 90 * 24 * time.Hour
	auditRetention      = 400 * 24 * time.Hour
	leaseRetention      = 35 * 24 * time.Hour
	suspenseRetention   = 35 * 24 * time.Hour
	historyRetention    = 35 * 24 * time.Hour
	credentialRetention = 35 * 24 * time.Hour
	segmentRetention    = 35 * 24 * time.Hour

	// MinRetention is the shortest retention of anything.
	MinRetention = 24 * time.Hour
)

const (
	// deleteBatchRows bounds the rows that one transaction deletes, so that it holds up no others.
	deleteBatchRows = 1000
	// deleteBatchInstances bounds the instances whose history one transaction deletes.
	deleteBatchInstances = 50
)

// Retention is how long rows stay.
type Retention struct {
	// Events counts from when an event was written, and so do Audit and Suspense. Suspense is also of segments that were
	// set aside.
	Events, Audit, Suspense time.Duration
	// Leases counts from the settlement of a member, or from the end of a lease that a later one has followed.
	Leases time.Duration
	// History counts from when an instance was decommissioned, from when an operation or revision of a living one was
	// superseded, and from when a backup was taken.
	History time.Duration
	// Credentials counts from when a join token, user token, session, invitation or publish intent ended.
	Credentials time.Duration
	// Segments is the dispute window: it counts from when a usage segment was posted.
	Segments time.Duration
}

// DefaultRetention is how long rows stay where the operator does not say.
func DefaultRetention() Retention {
	return Retention{
		Events: eventRetention, Audit: auditRetention, Suspense: suspenseRetention,
		Leases: leaseRetention, History: historyRetention, Credentials: credentialRetention,
		Segments: segmentRetention,
	}
}

// DeleteOld deletes the rows that are past their retention, and private keys that nobody took in time.
type DeleteOld struct {
	Passes
	Retention Retention

	batchRows, batchInstances int
	// observe is what a test puts around each transaction; it may be nil.
	observe func(db.Tx) db.Tx
}

// Do goes through each table in the order of an index, in short transactions, until nothing is due. Several processes
// may run it at once: a row that is due stays due, and deleting it twice changes nothing. A table that fails holds up
// no other.
func (c *DeleteOld) Do(ctx context.Context, now time.Time) error {
	rows, instances := cmp.Or(c.batchRows, deleteBatchRows), cmp.Or(c.batchInstances, deleteBatchInstances)
	before, r := func(d time.Duration) time.Time { return now.Add(-d) }, c.Retention
	return errors.Join(
		deleteOld(ctx, c, "events", event.DeleteOldEvents, before(r.Events), rows),
		deleteOld(ctx, c, "dead letters", webhook.DeleteOldDeadLetters, before(r.Events), rows),
		deleteOld(ctx, c, "audit", event.DeleteOldAudit, before(r.Audit), rows),
		deleteOld(ctx, c, "leases", ledger.DeleteOldLeases, before(r.Leases), rows),
		deleteOld(ctx, c, "suspense", ledger.DeleteOldSuspense, before(r.Suspense), rows),
		deleteOld(ctx, c, "usage set aside", finding.DeleteOldSetAside, before(r.Suspense), rows),
		deleteOld(ctx, c, "backups", backuprecord.DeleteOldRecords, before(r.History), rows),
		deleteOld(ctx, c, "history", instance.DeleteHistory, before(r.History), instances),
		deleteOld(ctx, c, "revisions", instance.DeleteOldRevisions, before(r.History), rows),
		deleteOld(ctx, c, "operations", instance.DeleteOldOperations, before(r.History), rows),
		deleteOld(ctx, c, "join tokens", fleet.DeleteOldTokens, before(r.Credentials), rows),
		deleteOld(ctx, c, "user tokens", iam.DeleteOldTokens, before(r.Credentials), rows),
		deleteOld(ctx, c, "sessions", iam.DeleteOldSessions, before(r.Credentials), rows),
		deleteOld(ctx, c, "invitations", iam.DeleteOldInvitations, before(r.Credentials), rows),
		deleteOld(ctx, c, "wrapped keys", secret.PurgeExpired, now, rows),
		deleteOld(ctx, c, "publish intents", artifact.DeleteOldIntents, before(r.Credentials), rows),
		deleteOld(ctx, c, "usage segments", ledger.DeleteOldArchive, before(r.Segments), rows),
	)
}

// deleteOld deletes batches, each in a transaction of its own, until one is not full.
func deleteOld[K any](ctx context.Context, c *DeleteOld, name string, batch func(context.Context, db.Tx,
	db.Old[K]) (K, int, error), before time.Time, limit int,
) error {
	type result struct {
		last K
		n    int
	}
	old, total := db.Old[K]{Before: before, Limit: limit}, 0
	for {
		r, err := db.RunTx(ctx, c.DB, func(tx db.Tx) (r result, err error) {
			if c.observe != nil {
				tx = c.observe(tx)
			}
			r.last, r.n, err = batch(ctx, tx, old)
			return r, err
		})
		total += r.n
		if err != nil || r.n < limit {
			if total > 0 {
				c.Log.InfoContext(ctx, "old rows were deleted", slog.String("kind", name), slog.Int("count", total),
					slog.Time("before", before))
			}
			return err
		}
		old.After = r.last
	}
}
