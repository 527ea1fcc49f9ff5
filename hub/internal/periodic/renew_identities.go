package periodic

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
)

// identityAside is how long an identity that cannot be renewed is set aside.
const identityAside = time.Hour

// RenewIdentities gives the app instances that are due the next key of their service account.
func (p Passes) RenewIdentities(ctx context.Context, hub change.Hub, now time.Time) error {
	rowOf := func(i secret.Identity) ledger.Row {
		return ledger.Row{ID: i.MemberID, OrgID: i.OrgID, NodeID: i.NodeID}
	}
	_, err := pass[secret.Identity]{
		Passes:       p,
		now:          now,
		kind:         finding.Identity,
		resourceType: change.Member,
		row:          rowOf,
		list: afterID(rowOf, func(ctx context.Context, tx db.Tx, after string) ([]secret.Identity, error) {
			return secret.DueIdentities(ctx, tx, after, now, passPageRows)
		}),
		process: func(ctx context.Context, tx db.Tx, i secret.Identity) (wasAside bool, err error) {
			err = change.RenewIdentity(ctx, tx, change.BySystem(db.NewID(), now), hub, i)
			return true, err
		},
		setAside: func(ctx context.Context, tx db.Tx, i secret.Identity) error {
			return secret.PostponeIdentity(ctx, tx, i.MemberID, now.Add(identityAside))
		},
	}.run(ctx)
	return err
}
