package periodic

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
)

// MarkSilentMembers fails the members whose external worker is silent. A hub that was away since before started first
// gives workers time to report.
func (p Passes) MarkSilentMembers(ctx context.Context, started, now time.Time) error {
	if now.Sub(started) < instance.MemberSilence {
		return nil
	}
	rowOf := func(s instance.SilentMember) ledger.Row {
		return ledger.Row{ID: s.ID, OrgID: s.OrgID, NodeID: s.NodeID}
	}
	_, err := pass[instance.SilentMember]{
		Passes:       p,
		now:          now,
		kind:         finding.Contact,
		resourceType: change.Member,
		row:          rowOf,
		list: afterID(rowOf, func(ctx context.Context, tx db.Tx, after string) ([]instance.SilentMember, error) {
			return instance.SilentMembers(ctx, tx, after, now, passPageRows)
		}),
		process: func(ctx context.Context, tx db.Tx, s instance.SilentMember) (wasAside bool, err error) {
			return true, markSilent(ctx, tx, s, now)
		},
		// The next pass tries again.
		setAside: func(context.Context, db.Tx, instance.SilentMember) error { return nil },
	}.run(ctx)
	return err
}

func markSilent(ctx context.Context, tx db.Tx, s instance.SilentMember, now time.Time) error {
	c, r, news, err := instance.MarkSilent(ctx, tx, s, now)
	if err != nil || !news {
		return err
	}
	return change.CompleteMember(ctx, tx, change.BySystem(db.NewID(), now), iam.InstanceWork, c, r)
}
