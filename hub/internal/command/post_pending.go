package command

import (
	"context"
	"log/slog"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
)

const (
	// DefaultPostingInterval is how long usage waits for the journal where the operator does not say. It draws on its hold
	// at once.
	DefaultPostingInterval = 24 * time.Hour
	// MinPostingInterval is the shortest.
	MinPostingInterval = time.Second
	// MaxPostingInterval is the longest.
	MaxPostingInterval = 24 * time.Hour
)

// PostPending writes usage to the journal once it has waited for Interval.
type PostPending struct {
	DB       *db.DB
	Interval time.Duration
	Log      *slog.Logger
}

// Do is a periodic pass. A subject whose postings cannot be written is set aside and tried again after Interval.
func (c *PostPending) Do(ctx context.Context, now time.Time) error {
	findingOf := func(p ledger.Pending) finding.Finding {
		return finding.Finding{
			NodeID: p.NodeID, Kind: finding.Posting, ResourceType: "subject", ResourceID: p.ID,
			At: now,
		}
	}
	_, err := pass[ledger.Pending]{
		db: c.DB, log: c.Log, now: now,
		list: func(ctx context.Context, tx db.Tx, after *ledger.Pending) ([]ledger.Pending, error) {
			var from ledger.Pending
			if after != nil {
				from = *after
			}
			return ledger.PendingPostings(ctx, tx, from, now.Add(-c.Interval), passPageRows)
		},
		org: func(p ledger.Pending) string { return p.OrgID },
		process: func(ctx context.Context, tx db.Tx, p ledger.Pending) error {
			if err := ledger.PostPending(ctx, tx, p.ID, now); err != nil {
				return err
			}
			return Resolve(ctx, tx, findingOf(p))
		},
		aside: func(ctx context.Context, tx db.Tx, p ledger.Pending) (finding.Finding, error) {
			return findingOf(p), ledger.PutOffPending(ctx, tx, p.ID, now)
		},
	}.run(ctx)
	return err
}
