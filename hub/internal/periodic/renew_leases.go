package periodic

import (
	"cmp"
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
)

// renewalPageRows bounds one listing of the members that are due.
const renewalPageRows = 5000

// RenewLeases gives members their next lease, before the one that runs ends.
type RenewLeases struct {
	Passes
	LeaseDuration time.Duration
	// Renewed and NotRenewed are called after the commit, from several goroutines; a member is not renewed when its org's
	// wallet does not cover the next lease.
	Renewed    func(ledger.Row)
	NotRenewed func(ledger.Row)

	pageRows int
}

// renewal is a member with whether it was renewed.
type renewal struct {
	ledger.Row
	ledger.Renewal
	// down: it is not to run.
	down bool
}

// Do renews the leases of the members that are due, an equal share of each page for each org. A member that is stopped,
// failed or to be decommissioned gets no lease; what its hold has too much goes back.
func (c *RenewLeases) Do(ctx context.Context, now time.Time) error {
	except, err := db.ReadTx(ctx, c.DB, func(tx db.Tx) ([]string, error) { return fleet.WithoutRenewal(ctx, tx) })
	if err != nil {
		return err
	}
	pageRows := cmp.Or(c.pageRows, renewalPageRows)
	_, err = pass[*renewal]{
		Passes:       c.Passes,
		now:          now,
		kind:         finding.Renewal,
		resourceType: change.Member,
		row:          func(r *renewal) ledger.Row { return r.Row },
		pageRows:     pageRows,
		// A larger transaction would conflict with the posting of usage, which draws on the same holds.
		batchRows: 1,
		// A row that was processed is not due any more, whatever came of it.
		anew: true,
		list: func(ctx context.Context, tx db.Tx, _ **renewal) ([]*renewal, error) {
			due, err := ledger.DueForRenewal(ctx, tx, except, now, pageRows)
			out := make([]*renewal, len(due))
			for i, r := range due {
				out[i] = &renewal{Row: r}
			}
			return out, err
		},
		process: func(ctx context.Context, tx db.Tx, r *renewal) (wasAside bool, err error) {
			r.Renewal = ledger.Renewal{}
			if r.down, err = instance.IsDown(ctx, tx, r.ID); err != nil {
				return false, err
			}
			if r.down {
				return false, ledger.ReduceHold(ctx, tx, r.ID, now)
			}
			r.Renewal, err = ledger.RenewLease(ctx, tx, ledger.LeaseRequest{
				SubjectID: r.ID,
				NodeID:    r.NodeID,
				Now:       now,
				Duration:  c.LeaseDuration,
			})
			return r.WasAside, err
		},
		committed: func(r *renewal) {
			switch {
			case r.down:
			case r.Issued:
				c.Renewed(r.Row)
			default:
				c.NotRenewed(r.Row)
			}
		},
	}.run(ctx)
	return err
}
