package command

import (
	"context"
	"log/slog"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
)

// SettleMembers gives the rest of the holds of closed members back, where nothing more is to come of them.
type SettleMembers struct {
	DB  *db.DB
	Log *slog.Logger
}

// Do looks at all members; it is a periodic pass. It returns how many it looked at.
func (c *SettleMembers) Do(ctx context.Context, now time.Time) (int, error) {
	return c.run(ctx, now, func(ctx context.Context, tx db.Tx, after *ledger.Row) ([]ledger.Row, error) {
		id := ""
		if after != nil {
			id = after.ID
		}
		return ledger.UnsettledMembers(ctx, tx, id, now, passPageRows)
	})
}

// Of looks at the members of nodes whose usage has just come in.
func (c *SettleMembers) Of(ctx context.Context, nodeIDs []string, now time.Time) error {
	_, err := c.run(ctx, now, func(ctx context.Context, tx db.Tx, after *ledger.Row) ([]ledger.Row, error) {
		if after != nil {
			return nil, nil
		}
		return ledger.FinalMembers(ctx, tx, nodeIDs, now)
	})
	return err
}

func (c *SettleMembers) run(ctx context.Context, now time.Time, list func(context.Context, db.Tx,
	*ledger.Row) ([]ledger.Row, error),
) (int, error) {
	findingOf := func(r ledger.Row) finding.Finding {
		return finding.Finding{
			NodeID: r.NodeID, Kind: finding.Settlement, ResourceType: resourceMember,
			ResourceID: r.ID, At: now,
		}
	}
	done, err := pass[ledger.Row]{
		db: c.DB, log: c.Log, now: now, list: list,
		org: func(r ledger.Row) string { return r.OrgID },
		process: func(ctx context.Context, tx db.Tx, r ledger.Row) error {
			wasAside, err := ledger.SettleDue(ctx, tx, r.ID, now)
			if err != nil || !wasAside {
				return err
			}
			return Resolve(ctx, tx, findingOf(r))
		},
		aside: func(ctx context.Context, tx db.Tx, r ledger.Row) (finding.Finding, error) {
			return findingOf(r), ledger.SetAside(ctx, tx, r.ID, now)
		},
	}.run(ctx)
	return len(done), err
}
