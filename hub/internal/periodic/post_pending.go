package periodic

import (
	"context"
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

// PostPending writes usage to the journal once it has waited for the interval. A subject whose postings cannot be
// written is set aside and tried again after the interval.
func (p Passes) PostPending(ctx context.Context, interval time.Duration, now time.Time) error {
	_, err := pass[ledger.Pending]{
		Passes:       p,
		now:          now,
		kind:         finding.Posting,
		resourceType: "subject",
		row:          func(p ledger.Pending) ledger.Row { return p.Row },
		list: func(ctx context.Context, tx db.Tx, after *ledger.Pending) ([]ledger.Pending, error) {
			var from ledger.Pending
			if after != nil {
				from = *after
			}
			return ledger.PendingPostings(ctx, tx, from, now.Add(-interval), passPageRows)
		},
		process: func(ctx context.Context, tx db.Tx, p ledger.Pending) (wasAside bool, err error) {
			// No row says whether it was set aside.
			return true, ledger.PostPending(ctx, tx, p.ID, now)
		},
		setAside: func(ctx context.Context, tx db.Tx, p ledger.Pending) error {
			return ledger.PutOffPending(ctx, tx, p.ID, now)
		},
	}.run(ctx)
	return err
}
