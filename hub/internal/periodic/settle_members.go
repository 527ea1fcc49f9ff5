package periodic

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
)

// SettleMembers gives the rest of the holds of closed members back, where no more usage of them can come. It returns
// how many it processed.
func (p Passes) SettleMembers(ctx context.Context, now time.Time) (int, error) {
	return p.settle(ctx, now, afterID(row, func(ctx context.Context, tx db.Tx, after string) ([]ledger.Row, error) {
		return ledger.UnsettledMembers(ctx, tx, after, now, passPageRows)
	}))
}

// SettleMembersOf is SettleMembers for the members of nodes whose usage has just been posted.
func (p Passes) SettleMembersOf(ctx context.Context, nodeIDs []string, now time.Time) error {
	_, err := p.settle(ctx, now, func(ctx context.Context, tx db.Tx, after *ledger.Row) ([]ledger.Row, error) {
		if after != nil {
			return nil, nil
		}
		return ledger.FinalMembers(ctx, tx, nodeIDs, now)
	})
	return err
}

func (p Passes) settle(ctx context.Context, now time.Time, list func(context.Context, db.Tx,
	*ledger.Row) ([]ledger.Row, error),
) (int, error) {
	done, err := pass[ledger.Row]{
		Passes:       p,
		now:          now,
		kind:         finding.Settlement,
		resourceType: change.Member,
		row:          row,
		list:         list,
		process: func(ctx context.Context, tx db.Tx, r ledger.Row) (wasAside bool, err error) {
			return ledger.SettleDue(ctx, tx, r.ID, now)
		},
	}.run(ctx)
	return len(done), err
}

func row(r ledger.Row) ledger.Row { return r }
