package command

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
)

// StartInstance runs a stopped or failed app instance again, where it was.
type StartInstance struct {
	DB *db.DB
	// LeaseDuration is the longest lease that a member gets with the start.
	LeaseDuration time.Duration
	// Revoked says whether the trust bundle has revoked a key.
	Revoked func(keyID string) bool
	// MinVersion gives the lowest version of an app that the trust bundle lets start; empty for any. It may be nil.
	MinVersion func(appSlug string) string
	// Poke wakes the dispatcher of a node.
	Poke func(nodeID string)
	// Turns are of the commands on instances.
	Turns *Turns
}

// Do answers with the instance in status deploying. No money, no start.
func (c *StartInstance) Do(ctx context.Context, m Meta, projectID, instanceID string) (instance.Instance, error) {
	out, err := inTurn(ctx, c.Turns, c.DB, projectID, func(tx db.Tx) (instanceResult, error) {
		return c.do(ctx, tx, m, projectID, instanceID)
	})
	if err != nil {
		return instance.Instance{}, err
	}
	return out.poke(c.Poke), nil
}

func (c *StartInstance) do(ctx context.Context, tx db.Tx, m Meta, projectID,
	instanceID string,
) (instanceResult, error) {
	return m.act(ctx, tx, iam.InstanceStart, projectID, instanceID, func(_ iam.Project, i instance.Instance,
		ask instance.Ask,
	) (instance.Change, error) {
		if _, _, err := instance.Start(i.Lifecycle, i.Past()); err != nil {
			return instance.Change{}, err
		}
		delegation, err := again(ctx, tx, m, i, i.Revision, i.Version, c.Revoked, c.MinVersion)
		if err != nil {
			return instance.Change{}, err
		}
		for _, member := range i.Members {
			// The lease may have run out while nobody needed it.
			covered, err := ledger.LeasedUntil(ctx, tx, member.ID)
			if err != nil {
				return instance.Change{}, err
			}
			if covered.After(m.Now.Add(billing.MinLease)) {
				continue
			}
			if _, err := ledger.IssueLease(ctx, tx, ledger.LeaseRequest{
				SubjectID: member.ID, NodeID: member.NodeID, Now: m.Now, Duration: c.LeaseDuration, AppSlug: i.AppSlug,
			}); err != nil {
				return instance.Change{}, err
			}
		}
		return instance.AskStart(ctx, tx, i, ask, delegation, m.Now)
	})
}
